"""Whether a profile is of what is to be planned for: the script's model and batch, and the cluster's devices.

The one idea: a profile of something else gives a plan that looks right and is not, so it is refused by file and key.
"""

from pathlib import Path

from ragtag.core.cluster import Cluster
from ragtag.core.errors import SettingError
from ragtag.core.profile import ModelFacts, Profile
from ragtag.cost.problem import assemble


def check_made_for(profile: Profile, source: Path, script: str, trains: Profile, *, batch: int | None) -> None:
    """Compare `profile`, from the file `source`, with what `script` `trains`.

    With `batch`, the batch to plan for is the one that is asked for, whatever the script says.

    Raises:
        SettingError: it was measured for another model, optimizer, data or batch.
    """
    theirs, ours = profile.model, trains.model
    again = f"Measure again: ragtag profile --output {source} {script}"
    if theirs.shape_hash != ours.shape_hash:
        raise SettingError(
            f"{source}: model.shape_hash: it was measured for {_described(theirs)}, and {script} trains "
            f"{_described(ours)}{_what_differs(theirs, ours)}. {again}"
        )
    if theirs.run_hash and theirs.run_hash != ours.run_hash:
        raise SettingError(
            f"{source}: model.run_hash: it was measured for {theirs.name} with other layers, samples of another shape "
            f"or another precision than those of {script}. {again}"
        )
    if (theirs.unit, theirs.separable) != (ours.unit, ours.separable):
        raise SettingError(
            f"{source}: model.unit: it was measured with {_units(theirs)}, and {script} trains with {_units(ours)}. "
            f"{again}"
        )
    if batch is None and profile.global_batch_size != trains.global_batch_size:
        raise SettingError(
            f"{source}: global_batch_size: {profile.global_batch_size}, and that of {script} is "
            f"{trains.global_batch_size}. {again}; or plan for another batch with the same measurements: "
            f"--batch {trains.global_batch_size}"
        )


def check_devices(profile: Profile, source: Path | None, cluster: Cluster, cluster_source: Path | None) -> None:
    """Check that `profile` knows every device of `cluster`, or one of its kind.

    Raises:
        SettingError: it does not; names files and key.
    """
    try:
        assemble(profile, cluster)
    except SettingError as error:
        where = f"{source}: devices: " if source is not None else ""
        whose = f" (the device is in {cluster_source})" if cluster_source is not None else ""
        raise SettingError(f"{where}{error}{whose}") from None


def _described(model: ModelFacts) -> str:
    return f"{model.name} ({model.parameters:,} parameters)"


def _what_differs(theirs: ModelFacts, ours: ModelFacts) -> str:
    if (theirs.name, theirs.parameters) != (ours.name, ours.parameters):
        return ""
    return ", with other names, shapes or dtypes of parameters, or another optimizer"


def _units(model: ModelFacts) -> str:
    return "any split of the batch" if model.separable else f"units of {model.unit} samples"
