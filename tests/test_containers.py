"""Tests of the containers' set-up script, in a fresh Debian root; the images themselves are not built."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONG = 3000.0  # s
INSIDE = """
set -eu
ip link set lo up
mount --bind {root} {root} && mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev
for folder in $PIP_FIND_LINKS; do
    if [ -d "$folder" ]; then mkdir -p {root}"$folder" && mount --bind "$folder" {root}"$folder"; fi
done
exec chroot {root} sh -c '{command}'
"""


def missing() -> str:
    if os.getuid() != 0:
        return "only root can make and enter a Debian root"
    absent = [program for program in ("debootstrap", "unshare", "chroot", "ip") if not shutil.which(program)]
    return f"not installed: {', '.join(absent)}" if absent else ""


def test_the_images_run_the_script_and_nothing_else():
    for name in ("Dockerfile", "labs.def"):
        text = (ROOT / "containers" / name).read_text()
        assert text.count("sh /course/containers/setup.sh") == 1 and "apt-get" not in text and "pip" not in text
    subprocess.run(["sh", "-n", ROOT / "containers" / "setup.sh"], check=True)


@pytest.mark.soak
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_fresh_debian_runs_the_course_without_the_network(tmp_path):
    root = tmp_path / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", "trixie", root], check=True, timeout=LONG, capture_output=True)
    (root / "course").mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", root / "course"], input=archive, check=True)
    for given in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf"):
        if Path(given).exists():
            shutil.copy(given, f"{root}{given}")
    if certificates := os.environ.get("PIP_CERT"):  # those of a network that has its own
        shutil.copy(certificates, root / "site.crt")
    assert "fsdp" in inside(root, "sh /course/containers/setup.sh")
    tour = inside(root, "cd /course && .venv/bin/python -m labs tour --ranks 2 --steps 2", "-n")
    assert "torch-fsdp" in tour
    trained = inside(root, "cd /course && .venv/bin/python -m labs train --mesh dp=2 --steps 2 --sample 0", "-n")
    assert "step     2/2" in trained


def inside(root: Path, command: str, *namespaces: str) -> str:
    """Run a command in a Debian root, in a mount namespace of its own; return what it prints."""
    words = ["unshare", "-m", *namespaces, "sh", "-c", INSIDE.format(root=root, command=command)]
    up = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "PIP_FIND_LINKS": ""} | {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "HTTP", "no_proxy"))
    }
    if (root / "site.crt").exists():
        up |= {"PIP_CERT": "/site.crt", "SSL_CERT_FILE": "/site.crt"}
    done = subprocess.run(words, env=up, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
