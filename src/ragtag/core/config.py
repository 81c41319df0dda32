"""`Config`: every setting that is not an argument of the trainer, each with its unit, its effect and a checked value.

The one idea: a setting is looked up where the object is made. An explicit argument beats the environment variable
RAGTAG_<NAME>, which beats the `[config]` table of the file $RAGTAG_CONFIG or ./ragtag.toml, which beats the default;
an error says which of these the value came from.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from ragtag.core.errors import SettingError, did_you_mean

_PREFIX = "RAGTAG_"
_OTHER_VARIABLES = frozenset(
    {
        "STORE_FD",
        "LAUNCHED",
        "SHARES",
        "CONFIG",
        "DEVICE",
        "EMULATE",
        "HOSTNAME",
        "PROFILE",
        "PROFILE_FRESH",
        "PROFILE_FACTS",
        "START_SHARES",
        "START_MICRO_BATCH",
        "START_RECOMPUTE",
        "TOKEN",
        "HUB",
        "RUN",
        "WORKER",
        "GUEST",
        "LAUNCHER_PIPE",
        "TLS",
        "ISLAND",
        "OUTER",
        "OUTER_TLS",
    }
)
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


class _ResolvingMeta(msgspec.StructMeta):
    # Hidden from type checkers, which would otherwise forget the fields' types and names.
    if not TYPE_CHECKING:

        def __call__(cls, *arguments, **settings):  # noqa: N805 - a metaclass's self is a class
            if arguments:
                raise SettingError(f"Config takes settings by name: Config(patience_s={arguments[0]!r}).")
            return cls.resolve(settings, environ=os.environ, directory=Path.cwd())


class Config(msgspec.Struct, frozen=True, kw_only=True, metaclass=_ResolvingMeta):
    """Settings of a run; must be equal on all ranks.

    Raises:
        SettingError: a name is misspelt, or a value has the wrong type or is out of range, wherever it came from.
    """

    patience_s: Annotated[float, Meta(gt=0, le=86400, description="a number of seconds above 0, at most 86400")] = 30.0
    """Seconds; bounds every wait inside ragtag. Code of yours with a live heartbeat gets ten times as long."""

    unit: Annotated[int, Meta(ge=1, description="a whole number of samples, at least 1, or None")] | None = None
    """Samples that are always computed together where loss or model mix samples; None: chosen (1 when separable)."""

    micro_batch: Annotated[int, Meta(ge=1, description="a whole number of samples, at least 1, or None")] | None = None
    """Largest number of samples in one forward, to bound memory; None: a rank's whole share at once."""

    recompute: Annotated[bool, Meta(description="True, False or None")] | None = None
    """Compute each block's activations again in backward instead of keeping them: on every rank, on none, or (None) on
    ranks whose memory does not hold the smallest piece of work otherwise."""

    wire: Annotated[Literal["fp32", "bf16"], Meta(description="'fp32' or 'bf16'")] = "fp32"
    """What gradients travel as: "bf16" halves the bytes and rounds the sums, equally on every rank."""

    layout: Annotated[
        Literal["auto", "replicated", "zero1", "zero2", "zero3", "pipeline"],
        Meta(description="'auto', 'replicated', 'zero1', 'zero2', 'zero3' or 'pipeline'"),
    ] = "auto"
    """What of the model's state is cut into slices, one a rank: nothing, optimizer state, gradients too, or parameters
    too; "auto": the first of these that fits every device's memory. Or "pipeline": each rank holds some of the model's
    blocks, and samples pass one rank after the other; "auto" takes it instead of slices that would have to travel
    between hosts, where it is predicted to be quicker."""

    slices: Annotated[tuple[int, ...], Meta(description="whole numbers by rank, or None")] | None = None
    """Relative sizes of these slices by rank, 0 allowed; None: in proportion to free memory."""

    stages: Annotated[str, Meta(description="stages such as '0:0-5, 1:5-8', or None")] | None = None
    """Which blocks each rank holds with layout "pipeline", "rank:first-stop" in the order in which samples pass, and
    "/" between pipelines that train side by side ("0:0-5, 1:5-8 / 2:0-8"); None: cut by measured times and memory."""

    blocks: Annotated[Any, Meta(description="a function from the model to a list of its modules, or None")] = None
    """Lists the model's blocks, in the order in which they run, each once a forward; None: the children of the
    `nn.Sequential` or `nn.ModuleList` that holds most of it."""

    reduce: Annotated[Literal["host", "nccl"], Meta(description="'host' or 'nccl'")] = "host"
    """Where gradients are summed: "host" in host memory, by the ring, for any mix of devices; "nccl" (experimental,
    never run by its authors) on NVIDIA GPUs, on every rank, in the gradients' own precision."""

    bucket_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="a whole number of bytes from 1024 to 1073741824")
    ] = 4 << 20
    """Bytes of gradient that are added up over ranks at a time: smaller overlaps sooner, larger has less overhead."""

    check_loss: Annotated[bool, Meta(description="True or False")] = True
    """Before step 1, compare the loss of 4 samples with that of 2 + 2, to find token means given as sample means."""

    seed_samples: Annotated[bool, Meta(description="True or False")] = True
    """Run `dataset[i]` with random numbers seeded by (seed, epoch, i), so that augmentation is the same on any rank."""

    overlap: Annotated[bool, Meta(description="True or False")] = True
    """Start adding up gradients over ranks inside the last backward instead of after it."""

    pull: Annotated[bool, Meta(description="True, False or None")] | None = None
    """Whether ranks that run dry take work from others inside a step; None: when speeds vary enough for it to pay."""

    cover_stalls: Annotated[bool, Meta(description="True or False")] = True
    """Where shares follow speed, let the others do the work of a rank whose loader or forward does not come back."""

    check_replicas_every: Annotated[int, Meta(ge=0, description="a whole number of steps; 0 means never")] = 100
    """Steps between comparisons of the ranks' parameters by hash; 0: never."""

    checkpoint: (
        Annotated[str, Meta(min_length=1, description="a directory, an fsspec URL such as s3://..., or None")] | None
    ) = None
    """Where the run keeps checkpoints, and goes on from when it is started again; None: nothing is automatic."""

    checkpoint_every_s: Annotated[float, Meta(gt=0, description="a number of seconds above 0, or None")] | None = 600.0
    """Seconds between checkpoints, at the next step boundary; None: not by time."""

    checkpoint_every_steps: (
        Annotated[int, Meta(ge=1, description="a whole number of steps, at least 1, or None")] | None
    ) = None
    """A checkpoint after every so many steps as well; None: not by steps."""

    checkpoint_keep: Annotated[int, Meta(ge=1, description="a whole number of checkpoints, at least 1")] = 3
    """How many checkpoints of the run stay; older ones are removed once a new one is complete."""

    checkpoint_in_background: Annotated[bool, Meta(description="True or False")] = False
    """Go on training while a checkpoint of the run is written, from copies in host memory that take as much of it as
    the state; in runs whose ranks come and go, and for the last one, training waits all the same."""

    mode: Annotated[
        Literal["auto", "exact", "islands", "async"], Meta(description="'auto', 'exact', 'islands' or 'async'")
    ] = "auto"
    """How sites train together that `ragtag launch --island` has started: "exact" waits for all of them after every
    step, in fp32, and is exact for `torch.optim.SGD` only, since others need every site's gradients; "islands" merges
    what they have done every few steps while they go on; "async" merges what comes when it comes; "auto": islands."""

    data: Annotated[Literal["global", "local"], Meta(description="'global' or 'local'")] = "global"
    """Whether every island has the whole dataset ("global"), or one of its own ("local"), which then counts by its
    size, whatever number of steps the island takes."""

    fragments: Annotated[int, Meta(ge=1, le=1024, description="a whole number of fragments, 1 to 1024")] = 4
    """Into how many fragments the model is cut, which islands exchange one after the other."""

    inner_steps: Annotated[int, Meta(ge=1, description="a whole number of steps, at least 1, or None")] | None = None
    """Steps from one exchange of a fragment between islands to the next; None: as few as the links allow."""

    warm_up_steps: Annotated[int, Meta(ge=0, description="a whole number of steps, or None")] | None = None
    """Steps that the first island does alone before the others begin with what it has; None: 7 % of all."""

    total_steps: Annotated[int, Meta(ge=1, description="a whole number of steps, at least 1, or None")] | None = None
    """After how many steps islands merge for the last time; None: at the end of the first `Trainer.steps`."""

    resume: Annotated[bool, Meta(description="True or False")] = True
    """Go on from what is in `checkpoint`; False: start anew, beside what is there, of which nothing is removed."""

    log: Annotated[str, Meta(min_length=1, description="a path such as runs/1/log.jsonl, or None")] | None = None
    """File to which the run's events are written, one JSON object a line; None: to none. `ragtag launch` names one."""

    @classmethod
    def resolve(cls, settings: Mapping[str, Any], *, environ: Mapping[str, str], directory: Path) -> "Config":
        """Return the Config of explicit `settings`, with `environ` and the files under `directory` filling the rest.

        `Config(**settings)` is this with the process's own environment and working directory.
        """
        fields = {field.name: field for field in msgspec.structs.fields(cls)}
        for name in settings:
            if name not in fields:
                raise SettingError(f"Config has no setting '{name}'.{_closest(name, fields)}")
        from_file, file = _read_file(environ, directory)
        for name in from_file:
            if name not in fields:
                raise SettingError(f"{file}: [config] has no setting '{name}'.{_closest(name, fields)}")
        from_environment = _read_environment(environ, fields)
        values = {}
        for name, field in fields.items():
            if name in settings:
                values[name] = _checked(name, settings[name], field.type, "")
            elif name in from_environment:
                variable, text = from_environment[name]
                value = _parse(text, field.type)
                values[name] = _checked(name, value, field.type, f", from the environment variable {variable},")
            elif name in from_file:
                value = _none_if_spelt(from_file[name], field.type)
                values[name] = _checked(name, value, field.type, f", from [config] in {file},")
            else:
                values[name] = field.default
        return msgspec.StructMeta.__call__(cls, **values)


def shares_from_environment(
    environ: Mapping[str, str], variable: Literal["RAGTAG_SHARES", "RAGTAG_START_SHARES"] = "RAGTAG_SHARES"
) -> tuple[int, ...] | None:
    """Return the shares in RAGTAG_SHARES ("8,5,3": samples by rank), or None where it is unset or empty.

    RAGTAG_START_SHARES says with which shares a run begins that follows speeds.

    Raises:
        SettingError: it is not a comma-separated list of whole numbers.
    """
    words = _words(environ, variable)
    if words and not all(word.isascii() and word.isdigit() for word in words):
        raise SettingError(
            f"The environment variable {variable} = '{environ[variable]}' is not valid. "
            f"Expected samples by rank, whole numbers with commas between: {variable}=8,5,3."
        )
    return tuple(int(word) for word in words) or None


def micro_batches_from_environment(environ: Mapping[str, str]) -> tuple[int | None, ...] | None:
    """Return what RAGTAG_START_MICRO_BATCH ("8,none,2": samples by rank) says is the most that each rank computes at a
    time, or None where it is unset or empty.

    Raises:
        SettingError: it is no such list.
    """
    variable = "RAGTAG_START_MICRO_BATCH"
    words = _words(environ, variable)
    if not all(word == "none" or (word.isascii() and word.isdigit() and int(word)) for word in words):
        raise SettingError(
            f"The environment variable {variable} = '{environ[variable]}' is not valid. Expected samples by rank, "
            f"whole numbers of at least 1, or none for no limit, with commas between: {variable}=8,none,2."
        )
    return tuple(None if word == "none" else int(word) for word in words) or None


def recompute_from_environment(environ: Mapping[str, str], rank: int) -> bool:
    """Return whether RAGTAG_START_RECOMPUTE ("no,yes,no": by rank) says that `rank` computes activations again.

    Raises:
        SettingError: it is no such list.
    """
    variable = "RAGTAG_START_RECOMPUTE"
    words = _words(environ, variable)
    if not all(word in ("yes", "no") for word in words):
        raise SettingError(
            f"The environment variable {variable} = '{environ[variable]}' is not valid. Expected yes or no by rank, "
            f"with commas between: {variable}=no,yes,no."
        )
    return rank < len(words) and words[rank] == "yes"


def _words(environ: Mapping[str, str], variable: str) -> list[str]:
    text = environ.get(variable, "").strip()
    return [word.strip().lower() for word in text.split(",")] if text else []


def _closest(name: str, known: Mapping[str, Any]) -> str:
    return did_you_mean(name.lower(), known) or f" Settings are {', '.join(sorted(known))}."


def _read_file(environ: Mapping[str, str], directory: Path) -> tuple[dict[str, Any], Path]:
    named = environ.get("RAGTAG_CONFIG", "")
    file = directory / (named or "ragtag.toml")
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("config", {})
    except FileNotFoundError as error:
        if not named:
            return {}, file
        raise SettingError(f"The environment variable RAGTAG_CONFIG names {file}, which does not exist.") from error
    except OSError as error:
        raise SettingError(f"The settings file {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"The settings file {file} is not valid TOML: {error}.") from error
    if not isinstance(table, dict):
        raise SettingError(f"{file}: config = {table!r} is not valid. Expected a table: [config], then name = value.")
    return table, file


def _read_environment(environ: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    found = {}
    for variable, text in environ.items():
        if not variable.upper().startswith(_PREFIX) or variable in (_PREFIX + name for name in _OTHER_VARIABLES):
            continue
        name = variable[len(_PREFIX) :].lower()
        if variable == _PREFIX + name.upper() and name in fields:
            # Job scripts set variables to nothing to unset them.
            if text.strip():
                found[name] = (variable, text.strip())
            continue
        close = did_you_mean(_PREFIX + name.upper(), _similar(name, fields))
        if close:
            raise SettingError(f"The environment variable {variable} = '{text}' names no setting.{close}")
    return found


def _similar(name: str, fields: Mapping[str, Any]) -> list[str]:
    # Compared without the shared prefix, which would make everything look alike.
    return [_PREFIX + field.upper() for field in fields if did_you_mean(name, [field])]


def _parse(text: str, kind: Any) -> Any:
    """Read `text` as `kind` would be written; what does not fit stays text, for `_checked` to refuse."""
    value = _none_if_spelt(text, kind)
    if value is None:
        return None
    kinds = _plain_types(kind)
    if tuple in kinds:
        words = [word.strip() for word in text.split(",")]
        return [int(word) for word in words] if all(word.isdigit() for word in words) else text
    if bool in kinds:
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                return text
    return text


def _none_if_spelt(value: Any, kind: Any) -> Any:
    # Neither TOML nor the environment has a None.
    spelt = isinstance(value, str) and value.strip().lower() == "none" and type(None) in _plain_types(kind)
    return None if spelt else value


def _plain_types(kind: Any) -> set[Any]:
    if get_origin(kind) is Annotated:
        return _plain_types(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return {str}
    if get_origin(kind) is tuple:
        return {tuple}
    parts = get_args(kind)
    return set().union(*(_plain_types(part) for part in parts)) if parts else {kind}


def _expected(kind: Any) -> str:
    for part in (kind, *get_args(kind)):
        for note in getattr(part, "__metadata__", ()):
            return note.description
    raise AssertionError(f"a setting of type {kind} has no description")


def _checked(name: str, value: Any, kind: Any, source: str) -> Any:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        if get_args(kind)[:1] != (Any,) or value is None or callable(value):
            return msgspec.convert(value, kind)
        message = f"{name} = {value!r}{source} is not valid. Expected {_expected(kind)}."
    except msgspec.ValidationError:
        message = f"{name} = {value!r}{source} is not valid. Expected {_expected(kind)}."
    raise SettingError(message)
