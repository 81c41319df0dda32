"""What `ragtag doctor` knows: facts about hosts, whether each pair can talk, and the findings that follow.

The one idea: gathering facts and asking peers act; the rules that turn facts into findings are pure.
"""
