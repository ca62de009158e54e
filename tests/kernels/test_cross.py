"""Products and attention without llama.cpp (kernels_check): with sanitizers, and on arm64 under an emulator.

A default run compiles two levels at most with sanitizers; all else takes minutes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
from llamaherd_kernels.library import available_levels
from llamaherd_kernels.library import levels as levels_built_in
from tests.kernels import cases

pytestmark = pytest.mark.timeout(1200)
KERNELS = Path(__file__).parents[2] / "kernels"
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian's cross compiler keeps them


def built(folder, *options):
    """kernels_check, compiled."""
    cmake = shutil.which(
        "cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if not cmake:
        pytest.skip("needs cmake: pip install cmake")
    subprocess.run([cmake, "-S", KERNELS, "-B", folder, *options], check=True, capture_output=True)
    cores = str(len(os.sched_getaffinity(0)))
    command = [cmake, "--build", folder, "--target", "kernels_check", "--parallel", cores]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr + done.stdout
    return folder / "kernels_check"


def needs_sanitizers(folder, names):
    """Skip where the compiler has no libraries for them, or they do not run."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    program = folder / "empty"
    program.with_suffix(".cpp").write_text("int main() {}\n")
    done = subprocess.run(
        [compiler, f"-fsanitize={names}", program.with_suffix(".cpp"), "-o", program],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0 or subprocess.run([program], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} does not make programs with -fsanitize={names}")


def output(command, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def arm_check(tmp_path_factory):
    for tool, package in ((ARM_COMPILER, "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}; on Debian and Ubuntu: apt install {package}")
    return built(
        tmp_path_factory.mktemp("arm"),
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}",
    )


def emulated(cpu, *command):
    return ["qemu-aarch64", "-L", ARM_LIBRARIES, "-cpu", cpu, *command]


@pytest.mark.slow
def test_arm64_gives_the_products_and_attention_of_float64(arm_check, tmp_path):
    """Of 2 x 8 by 8 x 2 (i8mm) the same bits as of dot products."""
    count = cases.write(tmp_path / "cases")
    text = output(emulated("max", arm_check, "--cases", tmp_path / "cases", "1", "i8mm", "dotprod"))
    found = re.findall(r"(\w+): (\d+) cases, 0 wrong, .* bits (\w+)", text)
    assert [(level, int(cases)) for level, cases, _ in found] == [("i8mm", count), ("dotprod", count)]
    assert found[0][2] == found[1][2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "here"),
    [
        ("max", ("i8mm", "dotprod")),
        ("neoverse-n1", ("dotprod",)),
        ("cortex-a76", ("dotprod",)),
        ("cortex-a53", ()),
    ],
)
def test_an_arm64_cpu_runs_the_levels_that_it_has_instructions_for(arm_check, cpu, here):
    levels = ("i8mm", "dotprod")
    expected = [f"{level}: {'runs' if level in here else 'does not run here'}" for level in levels]
    assert output(emulated(cpu, arm_check, *levels)).splitlines() == expected


def sanitized(folder, sanitizer, levels, repeats, types=None):
    """The check's verdict with a sanitizer; repeated, on 1 to 8 threads."""
    if not levels:
        pytest.skip("this CPU runs none of the levels")
    needs_sanitizers(folder, "thread" if sanitizer == "thread" else "address,undefined")
    check = built(
        folder / "build", f"-DLLAMAHERD_SANITIZE={sanitizer}", f"-DLLAMAHERD_LEVELS={';'.join(levels)}"
    )
    count = cases.write(folder / "cases", types)
    text = output([check, "--cases", folder / "cases", str(repeats), *levels])
    for level in levels:
        assert f"{level}: {count} cases, 0 wrong" in text


def test_sanitizers_of_addresses_and_undefined_behaviour_find_nothing(tmp_path):
    """The best level that runs here and the plainest, all types."""
    here = available_levels()
    sanitized(tmp_path, "ON", list(dict.fromkeys((*here[:1], *here[-1:]))), 1)


def test_the_sanitizer_of_threads_finds_nothing(tmp_path):
    """Rows of K-types are long enough to be prepared by the threads together."""
    sanitized(tmp_path, "thread", available_levels()[-1:], 2, ["Q4_1", "Q4_K"])


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["ON", "thread"])
def test_sanitizers_find_nothing_at_any_level(tmp_path, sanitizer):
    """In emulated levels they see the arithmetic too, which instructions hide from them."""
    here = available_levels()
    if sanitizer == "thread":
        sanitized(tmp_path, sanitizer, here, 2, ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
    else:
        emulated_levels = [name for name in levels_built_in() if name.startswith("emulated")]
        sanitized(tmp_path, sanitizer, [*here, *emulated_levels], 1)


@pytest.mark.slow
def test_a_wrong_product_is_found(tmp_path):
    """The check itself: an expected product that is off must be reported."""
    levels = available_levels()
    if not levels:
        pytest.skip("this CPU runs none of the levels")
    check = built(tmp_path / "build", f"-DLLAMAHERD_LEVELS={levels[0]}")
    path = tmp_path / "cases"
    cases.write(path, ["Q4_1"])
    data = bytearray(path.read_bytes())
    at = 20 + int.from_bytes(data[16:20], "little") + 33 * 32 * 4  # the first case's first product
    data[at : at + 8] = b"\0" * 8
    path.write_bytes(data)
    done = subprocess.run(
        [check, "--cases", path, "1", levels[0]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "a product is wrong" in done.stdout
