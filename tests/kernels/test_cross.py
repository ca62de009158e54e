"""Products without llama.cpp (kernels_check): on arm64 under an emulator, and with sanitizers. Minutes of compiling."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
from llamaherd_kernels.library import available_levels
from tests.kernels import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
KERNELS = Path(__file__).parents[2] / "kernels"
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian's cross compiler keeps them


def built(folder, *options):
    """kernels_check, compiled."""
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    subprocess.run(["cmake", "-S", KERNELS, "-B", folder, *options], check=True, capture_output=True)
    done = subprocess.run(
        [
            "cmake",
            "--build",
            folder,
            "--target",
            "kernels_check",
            "--parallel",
            str(len(os.sched_getaffinity(0))),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr + done.stdout
    return folder / "kernels_check"


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


def test_arm64_with_dot_products_gives_those_of_float64(arm_check, tmp_path):
    count = cases.write(tmp_path / "cases")
    text = output(emulated("max", arm_check, "--cases", tmp_path / "cases", "1", "dotprod"))
    assert f"dotprod: {count} cases, 0 wrong" in text


def test_arm64_without_dot_products_runs_no_level(arm_check):
    assert output(emulated("cortex-a53", arm_check, "dotprod")) == "dotprod: does not run here\n"
    assert output(emulated("max", arm_check, "dotprod")) == "dotprod: runs\n"


@pytest.mark.parametrize(("sanitizer", "repeats"), [("ON", 1), ("thread", 2)])
def test_sanitizers_find_nothing(tmp_path, sanitizer, repeats):
    """Twice on 1 to 8 threads with ThreadSanitizer: bitwise the same, and no race."""
    check = built(tmp_path / "build", f"-DLLAMAHERD_SANITIZE={sanitizer}")
    levels = available_levels()
    if not levels:
        pytest.skip("this CPU runs none of the levels")
    types = None if sanitizer == "ON" else ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"]
    count = cases.write(tmp_path / "cases", types)
    text = output([check, "--cases", tmp_path / "cases", str(repeats), *levels])
    for level in levels:
        assert f"{level}: {count} cases, 0 wrong" in text


def test_a_wrong_product_is_found(tmp_path):
    """The check itself: an expected product that is off must be reported."""
    check = built(tmp_path / "build")
    levels = available_levels()
    if not levels:
        pytest.skip("this CPU runs none of the levels")
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
