"""The commands: ``mok-cute check``, ``compile``, ``explain``, ``doctor``, ``demo``, ``cache``.

A command is a function from parsed arguments to an ``Outcome``: an exit code, one JSON object and a way to print it
for people. ``main`` turns errors into exit codes and keeps standard output clean: with ``--json`` exactly one object
appears there, errors included, and whatever else is said goes to standard error.

Exit codes: 0 ok, 1 wrong result, 2 usage, 3 unsupported, 4 timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mok_cute.config import KernelConfig, RunConfig
from mok_cute.errors import ConfigError, MokError, PeerTimeoutError, UnsupportedError
from mok_cute.shapes import PRESETS, MoEShape
from mok_cute.tables import show_check, show_compile, show_doctor, show_sections

if TYPE_CHECKING:
    from rich.console import Console

    from mok_cute.problem import CheckRequest

OK, WRONG, USAGE, UNSUPPORTED, TIMEOUT = range(5)
PRECISIONS = ("bf16", "mxfp8")
DIRECTIONS = ("forward", "backward", "both")
ARCHES = ("sm_90a", "sm_100a", "sm_103a")
DEVICES = ("cuda", *(f"virtual:{arch}" for arch in ARCHES))
ROUTINGS = ("random", "zipf", "all-to-one", "empty-rank")
PIPE_COLUMNS = 160
DEMO_LOCAL_EXPERTS, DEMO_TOKENS = 32, 2048

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a command hands back. ``show`` prints it for people; None: the lines are already out."""

    exit_code: int
    json: Json
    show: Callable[[Console], None] | None


# ---- arguments ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving, so that a usage error can also be told as JSON."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def build_parser() -> Parser:
    from mok_cute import __version__

    parser = Parser(prog="mok-cute", allow_abbrev=False, description="A mixture-of-experts layer as one GPU kernel.")
    parser.add_argument("--version", action="version", version=f"mok-cute {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (add_arguments, run) in COMMANDS.items():
        summary = (run.__doc__ or "").strip().splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.set_defaults(run=run, parser=sub)
    return parser


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape", "explicit sizes override the preset's")
    group.add_argument("--shape", default="tiny", metavar="PRESET", help=f"{', '.join(PRESETS)} (default: tiny)")
    group.add_argument("--hidden", type=int, metavar="N", help="width of x and y")
    group.add_argument("--intermediate", type=int, metavar="N", help="width inside a routed expert")
    group.add_argument("--experts", type=int, metavar="N", help="routed experts over all ranks")
    group.add_argument("--local-experts", type=int, metavar="N", help="routed experts per rank: N * ranks in all")
    group.add_argument("--topk", type=int, metavar="N", help="routes per token")
    group.add_argument("--shared", type=int, metavar="N", help="width inside the shared expert; 0: none")
    group.add_argument("--swiglu-limit", type=float, metavar="F", help="clamp before the activation")
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="ranks of the group (default: 1)")


def add_kind_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run-time choices", "they change speed and memory, never results")
    group.add_argument("--minibatch", type=int, metavar="N", help="routed rows handed over at once")
    group.add_argument("--macrobatch", type=int, metavar="N", help="routed rows that the rings hold")
    group.add_argument("--comm-sms", type=int, metavar="N", help="SMs that move rows before they compute")


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)
    add_kind_arguments(parser)
    add_run_arguments(parser)
    parser.add_argument("--tokens", default="128", metavar="T", help="tokens per rank, or T0,T1,... (default: 128)")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--routing", default="random", metavar="KIND", help=f"{', '.join(ROUTINGS)} or file:PATH")
    parser.add_argument("--inputs", choices=("normal", "integers"), default="normal")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    orders = parser.add_mutually_exclusive_group()
    orders.add_argument(
        "--schedule-seeds", type=int, metavar="K", help="runs, each in another order of events (virtual devices; 2)"
    )
    orders.add_argument(
        "--schedule-seed", type=int, metavar="N", help="both runs in the order of this seed (virtual devices)"
    )
    parser.add_argument("--check-races", action="store_true", help="also look for races (virtual devices); slower")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write results and pre-activations as safetensors")
    parser.add_argument("--cases", type=Path, metavar="FILE", help="JSON list of option objects, run in one process")


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)
    add_kind_arguments(parser)
    parser.add_argument("--arch", choices=ARCHES, default="sm_90a")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write PTX and cubin here")


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)
    add_run_arguments(parser)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--tokens", type=int, default=4096, metavar="T", help="tokens per rank (default: 4096)")


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "verify", "clear"))


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes none of its own."""


def shape_of(args: argparse.Namespace) -> MoEShape:
    """The preset with explicit sizes put in their places."""
    if args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks}: at least 1; pass the number of ranks.")
    experts = args.experts
    if args.local_experts is not None:
        if experts is not None:
            raise ConfigError("--local-experts and --experts both set the number of experts; pass one of them.")
        if args.local_experts < 1:
            raise ConfigError(f"--local-experts {args.local_experts}: at least 1; pass the experts of one rank.")
        experts = args.local_experts * args.ranks
    return MoEShape.preset(
        args.shape,
        hidden=args.hidden,
        intermediate=args.intermediate,
        num_experts=experts,
        topk=args.topk,
        shared_intermediate=args.shared,
        shared_factor=False if args.shared == 0 else None,
        swiglu_limit=args.swiglu_limit,
    )


def run_config_of(args: argparse.Namespace) -> RunConfig:
    """Defaults with what was asked. A macrobatch not asked for becomes a whole number of the minibatches asked for."""
    asked = {name: getattr(args, name) for name in ("minibatch", "macrobatch", "comm_sms")}
    given = {name: value for name, value in asked.items() if value is not None}
    default = RunConfig()
    if "minibatch" in given and "macrobatch" not in given and given["minibatch"] > 0:
        given["macrobatch"] = max(default.macrobatch // given["minibatch"], 1) * given["minibatch"]
    if "macrobatch" in given and "minibatch" not in given and given["macrobatch"] > 0:
        given["minibatch"] = math.gcd(default.minibatch, given["macrobatch"])
    return RunConfig(**given)


def tokens_of(text: str, ranks: int) -> tuple[int, ...]:
    """ "T" is every rank's count, "T0,T1,..." one per rank."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {text}: one count, or one per rank separated by commas; change it.") from None
    if len(counts) == 1:
        counts *= ranks
    if len(counts) != ranks:
        raise ConfigError(f"--tokens {text}: {len(counts)} counts for --ranks {ranks}; pass one, or one per rank.")
    if min(counts) < 0:
        raise ConfigError(f"--tokens {text}: counts are at least 0; change it.")
    return counts


def require_built(precision: str, direction: str) -> None:
    if precision != "bf16":
        raise UnsupportedError(f"--precision {precision}: only bf16 is built; choose --precision bf16.")
    if direction != "forward":
        raise UnsupportedError(f"--direction {direction}: only forward is built; choose --direction forward.")


def require_device(device: str) -> None:
    """Refuse a device that is not here. A virtual one is everywhere; what it needs, it asks for when it is entered."""
    if device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: no CUDA device is visible; it takes an NVIDIA GPU, its driver and a CUDA build of "
            "torch. Run on such a machine, or choose --device virtual:sm_90a, which needs no GPU."
        )


def schedule_seeds_of(args: argparse.Namespace) -> tuple[int, ...]:
    """The orders of events to run in, at least two of them: only then does a check see whether bits repeat."""
    for option, value, least in (("seeds", args.schedule_seeds, 1), ("seed", args.schedule_seed, 0)):
        if value is not None and args.device == "cuda":
            raise ConfigError(f"--schedule-{option} {value}: only for virtual devices; drop it.")
        if value is not None and value < least:
            raise ConfigError(f"--schedule-{option} {value}: at least {least}; change it.")
    if args.check_races and args.device == "cuda":
        raise ConfigError("--check-races: only for virtual devices; drop it.")
    if args.schedule_seed is not None:
        return (args.schedule_seed,) * 2
    count = 2 if args.schedule_seeds is None else args.schedule_seeds
    return tuple(range(count)) if count > 1 else (0, 0)


def check_request_of(args: argparse.Namespace) -> CheckRequest:
    from mok_cute.problem import CheckRequest

    shape = shape_of(args)
    tokens = tokens_of(args.tokens, args.ranks)
    run = run_config_of(args)
    kind, _, path = args.routing.partition(":")
    if args.routing not in ROUTINGS and (kind != "file" or not path):
        raise ConfigError(f"--routing {args.routing}: one of {', '.join(ROUTINGS)}, or file:PATH; change it.")
    if kind == "file" and not Path(path).is_file():
        raise ConfigError(f"--routing {args.routing}: there is no such file; pass a safetensors file.")
    schedule_seeds = schedule_seeds_of(args)
    require_built(args.precision, args.direction)
    require_device(args.device)
    return CheckRequest(
        shape=shape,
        ranks=args.ranks,
        tokens=tokens,
        run=run,
        device=args.device,
        routing=args.routing,
        inputs=args.inputs,
        seed=args.seed,
        schedule_seeds=schedule_seeds,
        check_races=args.check_races,
        save=args.save,
    )


# ---- commands -------------------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> Outcome:
    """Run the layer twice and compare it with the reference."""
    if args.cases is not None:
        return check_cases(args)
    from mok_cute.checking import run_check

    result = run_check(check_request_of(args), say)
    return Outcome(OK if result.ok else WRONG, result.to_json(), lambda console: show_check(console, result.to_json()))


def check_cases(args: argparse.Namespace) -> Outcome:
    """Every case of the file in this process, one JSON line each as soon as it is known."""
    worst = OK
    cases = read_cases(args.cases)
    for case in cases:
        shared = copy.copy(args)
        shared.cases = None

        def one(case: Json = case, defaults: argparse.Namespace = shared) -> Outcome:
            return check(args.parser.parse_args(case_arguments(case), namespace=defaults))

        with only_stderr():
            outcome = guarded(one)
        emit({**outcome.json, "case": case, "exit_code": outcome.exit_code})
        worst = max(worst, outcome.exit_code)
    return Outcome(worst, {"ok": worst == OK, "cases": len(cases)}, None)


def read_cases(path: Path) -> list[Json]:
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--cases {path}: cannot be read ({error.strerror}); pass a JSON file.") from error
    except ValueError as error:
        raise ConfigError(f"--cases {path}: not JSON ({error}); pass a list of option objects.") from error
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError(f"--cases {path}: must be a JSON list of option objects; change it.")
    return cases


def case_arguments(case: Json) -> list[str]:
    """{"tokens": [1, 2], "comm-sms": 4} -> ["--tokens=1,2", "--comm-sms=4"]; false and null leave an option out."""
    arguments = []
    for key, value in case.items():
        option = "--" + key.replace("_", "-")
        if option in ("--cases", "--help"):
            raise ConfigError(f"{key!r} cannot stand inside a case; remove it.")
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(option)
        elif isinstance(value, list):
            arguments.append(f"{option}={','.join(map(str, value))}")
        else:
            arguments.append(f"{option}={value}")
    return arguments


def compile_command(args: argparse.Namespace) -> Outcome:
    """Compile the kernel for a shape and machine; needs no GPU."""
    shape = shape_of(args)
    require_built(args.precision, args.direction)
    document = compile_document(shape, args.arch, args.ranks, args.out)
    return Outcome(OK, document, lambda console: show_compile(console, document))


def compile_document(shape: MoEShape, arch_name: str, ranks: int, out: Path | None) -> Json:
    from mok_cute.arch import ARCHS

    config = KernelConfig.default(arch_name)
    local_experts = shape.local_experts(ranks)
    config.validate(shape, arch_name, ARCHS[arch_name].smem_bytes_per_cta, local_experts)
    from mok_cute.compile import compile_forward

    compiled = compile_forward(shape, config, arch_name, local_experts)
    document: Json = {
        "ok": True,
        **compiled.figures.to_json(),
        "compile_seconds": compiled.compile_seconds,
        "cached": compiled.cached,
        "arch": arch_name,
        "ranks": ranks,
        "local_experts": local_experts,
        "precision": config.precision,
        "direction": "forward",
        "shape": dataclasses.asdict(shape),
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        ptx, cubin = (out / f"forward_{arch_name}.{suffix}" for suffix in ("ptx", "cubin"))
        ptx.write_text(compiled.ptx, encoding="utf-8")
        cubin.write_bytes(compiled.cubin)
        document["files"] = {"ptx": str(ptx), "cubin": str(cubin)}
    return document


def explain_command(args: argparse.Namespace) -> Outcome:
    """Print what a launch will do: sizes, phases, order of tasks, signals, workspace."""
    from mok_cute.explain import describe

    if args.tokens < 0:
        raise ConfigError(f"--tokens {args.tokens}: at least 0; change it.")
    require_built(args.precision, "forward")
    sections = describe(shape_of(args), KernelConfig(), run_config_of(args), args.ranks, args.tokens)
    return Outcome(OK, {"ok": True, **sections}, lambda console: show_sections(console, sections))


def doctor_command(args: argparse.Namespace) -> Outcome:
    """Report versions, GPU, DSL flavours, cache and settings, with findings."""
    from mok_cute.doctor import examine

    report = examine()
    return Outcome(OK, report, lambda console: show_doctor(console, report))


def demo(args: argparse.Namespace) -> Outcome:
    """Run a DeepSeek-V3 layer and check it; without a GPU, compile it and show what would run."""
    shape = MoEShape.preset("deepseek-v3", num_experts=DEMO_LOCAL_EXPERTS)
    reason = why_no_kernel_can_run()
    if reason is not None:
        return demo_without_gpu(shape, reason)
    from mok_cute.checking import run_check
    from mok_cute.problem import CheckRequest

    result = run_check(CheckRequest(shape=shape, ranks=1, tokens=(DEMO_TOKENS,)), say)
    document = {**result.to_json(), "kernel_ran": True}

    def show(console: Console) -> None:
        console.print(
            f"One forward of a DeepSeek-V3 layer with {DEMO_LOCAL_EXPERTS} experts and {DEMO_TOKENS} tokens "
            "as one kernel launch, compared with plain torch:"
        )
        show_check(console, document)

    return Outcome(OK if result.ok else WRONG, document, show)


def why_no_kernel_can_run() -> str | None:
    """None when a device here runs the kernels of this build."""
    try:
        require_device("cuda")
        import torch

        from mok_cute.arch import Arch

        arch = Arch.of_device(torch.device("cuda"))
    except UnsupportedError as error:
        return str(error)
    return None if arch.name == "sm_90a" else f"the GPU is {arch.name}; the forward kernel is built for sm_90a."


def demo_without_gpu(shape: MoEShape, reason: str) -> Outcome:
    from mok_cute.explain import describe
    from mok_cute.protocol_model import verdict

    say("compiling the forward kernel for sm_90a")
    compiled = compile_document(shape, "sm_90a", 1, None)
    sections = describe(shape, KernelConfig(), RunConfig(), 1, DEMO_TOKENS)
    say("exploring orders of the protocol model")
    judged = verdict()
    model = {
        "ok": judged.ok,
        "cases": judged.cases,
        "states": judged.states,
        "random_steps": judged.random_steps,
        "bounds": list(judged.bounds),
        "findings": list(judged.findings),
    }
    document = {
        "ok": judged.ok,
        "kernel_ran": False,
        "reason": reason,
        "compile": compiled,
        "explain": sections,
        "protocol_model": model,
    }

    def show(console: Console) -> None:
        show_compile(console, compiled)
        show_sections(console, {name: sections[name] for name in ("phases", "order")})
        show_sections(console, {"protocol model": model})
        console.print(f"No kernel ran: {reason}", style="bold yellow", markup=False)

    return Outcome(OK if judged.ok else WRONG, document, show)


def cache_command(args: argparse.Namespace) -> Outcome:
    """List, verify or clear the compiled kernels on disk."""
    from mok_cute import cache
    from mok_cute.settings import Settings

    settings = Settings.from_environment()
    document: Json = {"ok": True, "action": args.action, "directory": str(cache.cache_directory(settings))}
    if args.action == "clear":
        document["removed"] = cache.clear(settings)
        return Outcome(OK, document, lambda console: show_sections(console, {"cache": document}))
    entries = cache.verify(settings) if args.action == "verify" else cache.list_entries(settings)
    document["entries"] = [dataclasses.asdict(entry) for entry in entries]
    document["ok"] = not any(entry.problem for entry in entries)
    rows = [
        {
            "key": entry.key[:16],
            "arch": entry.arch,
            "functions": list(entry.functions),
            "KiB": entry.num_bytes // 1024,
            "compile_seconds": entry.compile_seconds,
            "problem": entry.problem,
        }
        for entry in entries
    ]
    return Outcome(
        OK if document["ok"] else WRONG, document, lambda console: show_sections(console, {document["directory"]: rows})
    )


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], Outcome]]
COMMANDS: dict[str, Command] = {
    "check": (add_check_arguments, check),
    "compile": (add_compile_arguments, compile_command),
    "explain": (add_explain_arguments, explain_command),
    "doctor": (no_arguments, doctor_command),
    "demo": (no_arguments, demo),
    "cache": (add_cache_arguments, cache_command),
}


# ---- the process ----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress for people who watch; never on standard output."""
    if sys.stderr.isatty():
        print(f"mok-cute: {text} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_stderr() -> Iterator[None]:
    """Sends everything written to standard output, also by libraries below Python, to standard error."""
    sys.stdout.flush()
    try:
        saved: int | None = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a process without these descriptors has nothing to keep clean
        saved = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def emit(document: Json) -> None:
    print(json.dumps(plain(document), allow_nan=False), flush=True)


def plain(value: Any) -> Any:
    """The value with what JSON lacks written as text: infinities and NaN, paths."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def guarded(command: Callable[[], Outcome]) -> Outcome:
    """Run a command; an error becomes an outcome with its exit code."""
    try:
        return command()
    except PeerTimeoutError as error:
        return failure(TIMEOUT, error, {"report": dataclasses.asdict(error.report)})
    except UnsupportedError as error:
        return failure(UNSUPPORTED, error)
    except ConfigError as error:
        return failure(USAGE, error)
    except MokError as error:
        return failure(WRONG, error)
    except Exception as error:  # ours to mend: the traceback is for the report of it
        traceback.print_exc(file=sys.stderr)
        return failure(WRONG, error)


def failure(exit_code: int, error: Exception, more: Json | None = None) -> Outcome:
    message = str(error) or type(error).__name__
    described = {"type": type(error).__name__, "message": message, "exit_code": exit_code, **(more or {})}
    return Outcome(
        exit_code,
        {"ok": False, "error": described},
        lambda console: print(f"mok-cute: {message}", file=sys.stderr),
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments

    def whole() -> Outcome:
        args = build_parser().parse_args(arguments)
        if as_json and getattr(args, "cases", None) is None:
            with only_stderr():
                return args.run(args)
        return args.run(args)

    try:
        outcome = guarded(whole)
        if outcome.show is not None and as_json:
            emit(outcome.json)
        elif outcome.show is not None:
            from rich.console import Console

            # A pipe has no width: wide enough for the longest opcode, so that each stays on one line.
            outcome.show(Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS))
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` does; Python would complain at exit once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return WRONG
    return outcome.exit_code
