"""Who may import whom, and what an import may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mok_cute.cache import HOST_SOURCES

ROOT = Path(__file__).parents[1]
PACKAGE, TEMPLATES = ROOT / "mok_cute", ROOT / "templates"

# Device code sees what the model asks for and how it is computed, never how the host arranges it.
TEMPLATES_MAY_SEE = {"shapes", "config", "arch", "workspace", "errors", "templates"}

# Pure data that host code reads as well: no DSL types are made when it is used.
ORDER = "mok_cute.templates.scheduler.order"
LAUNCH_ARGS = "mok_cute.templates.launch_args"  # names and types of a launch's arguments, counters, control words
RECORDS = "mok_cute.templates.records"  # what a wait writes when it gives up
SCHEDULE = "mok_cute.templates.schedule"
DATA = (ORDER, LAUNCH_ARGS, RECORDS, SCHEDULE + ".layout")

# Host modules that reach into the templates, and what they reach for; all others reach nothing.
HOST_MAY_SEE: dict[str, tuple[str, ...]] = {
    "compile": ("mok_cute.templates",),  # makes kernels, by way of the registry where there is a choice
    "config": (ORDER,),
    "explain": DATA,
    "protocol_model": (ORDER,),
    "protocol_steps": (ORDER,),
    "time_model": (ORDER,),
    "schedule": DATA,
    "workspace": DATA,
    "launcher": DATA,
    "functional": DATA,
    "cache": ("mok_cute.templates",),  # reads its files for the fingerprint
}
NO_OTHER_LIBRARY = {"errors", "shapes", "settings", "protocol_model", "protocol_steps"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports, each with whether that happens when the file itself is imported.

    ``from a import b`` gives both ``a`` and ``a.b``, as b may be a module; code under TYPE_CHECKING gives nothing.
    """

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for other in child.orelse:
                    yield from walk(other, at_import)
            elif isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative imports hide where a name comes from"
                yield child.module or "", at_import
                yield from ((f"{child.module}.{alias.name}", at_import) for alias in child.names)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, at_import and not inside)

    return walk(ast.parse(path.read_text()), True)


def modules_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def fresh(code: str) -> str:
    """Output of a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_neither_torch_nor_the_compiler() -> None:
    loaded = fresh("import sys, mok_cute; mok_cute.MoEShape, mok_cute.KernelConfig; print(*sys.modules, sep='\\n')")
    heavy = {"torch", "cutlass", "tvm_ffi", "cuda", "numpy", "rich", "safetensors"}
    assert heavy.isdisjoint(loaded.split())


LIGHT = "errors shapes config settings arch figures cache compile explain schedule symmetric workspace launcher"


@pytest.mark.parametrize("module", [*LIGHT.split(), "functional", "cli"])
def test_light_modules_load_neither_torch_nor_the_compiler(module: str) -> None:
    loaded = fresh(f"import sys, mok_cute.{module}; print(*sys.modules, sep='\\n')")
    assert {"torch", "cutlass", "tvm_ffi"}.isdisjoint(loaded.split())


def test_importing_every_template_loads_no_torch() -> None:
    names = [
        ".".join(("mok_cute.templates", *path.relative_to(TEMPLATES).with_suffix("").parts)).removesuffix(".__init__")
        for path in modules_of(TEMPLATES)
    ]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sys.modules, sep='\\n')"
    loaded = fresh(code).split()
    assert set(names) <= set(loaded) and "torch" not in loaded


@pytest.mark.parametrize("path", modules_of(TEMPLATES), ids=lambda path: str(path.relative_to(ROOT)))
def test_templates_import_only_what_device_code_may_see(path: Path) -> None:
    for module, _ in imports(path):
        assert not is_within(module, "torch"), f"{path} imports torch"
        if module.startswith("mok_cute."):
            assert module.split(".")[1] in TEMPLATES_MAY_SEE, f"{path} imports {module}"


def test_host_modules_that_templates_see_are_in_the_fingerprint_of_the_cache() -> None:
    modules = {module for path in modules_of(TEMPLATES) for module, _ in imports(path)}
    seen = {module.split(".")[1] for module in modules if module.startswith("mok_cute.")} - {"templates"}
    assert seen
    assert {f"{name}.py" for name in seen} <= set(HOST_SOURCES)


@pytest.mark.parametrize("path", modules_of(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_host_modules_reach_templates_only_where_it_is_stated(path: Path) -> None:
    name = path.relative_to(PACKAGE).with_suffix("").parts[0]
    allowed = HOST_MAY_SEE.get(name, ())
    for module, _ in imports(path):
        if not is_within(module, "mok_cute.templates"):
            continue
        parents = any(is_within(target, module) for target in allowed)  # `from mok_cute.templates import x`
        assert parents or any(is_within(module, target) for target in allowed), f"{path} imports {module}"


@pytest.mark.parametrize("name", sorted(NO_OTHER_LIBRARY))
def test_modules_of_pure_python_use_the_standard_library_alone(name: str) -> None:
    for module, _ in imports(PACKAGE / f"{name}.py"):
        top = module.split(".")[0]
        assert top == "mok_cute" or top in sys.stdlib_module_names, f"{name} imports {module}"


def test_the_task_order_is_pure_python() -> None:
    for module, _ in imports(TEMPLATES / "scheduler" / "order.py"):
        assert module.split(".")[0] in sys.stdlib_module_names, f"order.py imports {module}"


@pytest.mark.parametrize("module", DATA)
def test_data_that_host_and_device_share_is_pure_python(module: str) -> None:
    path = TEMPLATES.joinpath(*module.split(".")[2:]).with_suffix(".py")
    for imported, _ in imports(path):
        pure = any(is_within(data, imported) or is_within(imported, data) for data in DATA)
        assert pure or imported.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {imported}"


def test_explain_loads_neither_torch_nor_the_compiler() -> None:
    code = "import sys; from mok_cute import cli; cli.main(['explain']); print(*sys.modules, sep='\\n')"
    assert {"torch", "cutlass", "tvm_ffi"}.isdisjoint(fresh(code).split())


def test_the_reference_sees_torch_and_shapes_alone() -> None:
    for module, _ in imports(PACKAGE / "reference.py"):
        inside = module in ("mok_cute", "mok_cute.shapes", "mok_cute.errors") or module.startswith(
            ("mok_cute.shapes.", "mok_cute.errors.")
        )
        assert inside or module.split(".")[0] in {"torch", *sys.stdlib_module_names}, f"reference.py imports {module}"


def test_only_settings_reads_the_environment() -> None:
    for path in modules_of(PACKAGE) + modules_of(TEMPLATES):
        if path == PACKAGE / "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv", "environb"), f"{path}:{node.lineno} reads the environment"


def test_only_arch_asks_the_device_and_only_doctor_prints_it() -> None:
    for path in modules_of(PACKAGE) + modules_of(TEMPLATES):
        if path in (PACKAGE / "arch.py", PACKAGE / "doctor.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("get_device_capability", "get_device_properties", "multi_processor_count"), (
                    f"{path}:{node.lineno} asks the device"
                )


def test_every_folder_of_the_package_is_listed_for_installation() -> None:
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {("mok_cute", *path.parent.relative_to(PACKAGE).parts) for path in modules_of(PACKAGE)}
    folders |= {("mok_cute", "templates", *path.parent.relative_to(TEMPLATES).parts) for path in modules_of(TEMPLATES)}
    assert sorted(listed) == sorted(".".join(folder) for folder in folders)


def test_every_folder_with_sources_is_a_package() -> None:
    for path in modules_of(PACKAGE) + modules_of(TEMPLATES):
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"
