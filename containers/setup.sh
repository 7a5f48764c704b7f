#!/bin/sh
# Set up the course in a fresh Debian or Ubuntu, as root, and run a first job: sh containers/setup.sh
# The Dockerfile and labs.def both run this.  Afterwards the course needs no network.
set -eu
cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1
apt-get update -q
apt-get install -q -y --no-install-recommends ca-certificates git make python3 python3-venv
make tour ARGS="--ranks 2 --steps 2 --strategies fsdp"
rm -rf /var/lib/apt/lists/*
