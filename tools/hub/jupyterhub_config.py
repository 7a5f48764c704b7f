"""Settings of a JupyterHub for a class on one machine: a JupyterLab per learner, whose kernels are the course's Python.

    make hub                    installs JupyterHub and its proxy in build/hub-env, and plays learners who work at once
    HUB=hub build/hub-env/bin/jupyterhub --config tools/hub/jupyterhub_config.py      starts the same hub, for people

HUB names a folder with a home folder per learner, and HUB_PASSWORD the password of all of them; without one, the log
says which was drawn.  All servers run as the user that starts the hub, and the hub listens on this machine alone, so
that is a hub for trying.  A class takes an authenticator and a spawner of its site; the other lines stay.
"""

import json
import os
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT, COURSE = Path(sys.prefix), ROOT / ".venv"
HUB = Path(os.environ.get("HUB", "hub")).resolve()
PASSWORD = os.environ.get("HUB_PASSWORD") or secrets.token_hex(8)
TOKEN = os.environ.get("HUB_TOKEN")
PORT, PROXY, INSIDE = map(int, os.environ.get("HUB_PORTS", "8000 8001 8081").split())

# The notebooks ask for the kernel python3. In this environment, that would be a Python without the course.
kernel = HUB / "jupyter/kernels/python3/kernel.json"
kernel.parent.mkdir(parents=True, exist_ok=True)
command = [str(COURSE / "bin/python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
kernel.write_text(json.dumps({"argv": command, "display_name": "Training labs", "language": "python"}))

c = get_config()  # noqa: F821  (JupyterHub defines it)
c.JupyterHub.bind_url = f"http://127.0.0.1:{PORT}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{INSIDE}"
c.JupyterHub.db_url = f"sqlite:///{HUB}/hub.sqlite"
c.JupyterHub.cookie_secret_file = str(HUB / "cookie_secret")
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{PROXY}"
c.ConfigurableHTTPProxy.pid_file = str(HUB / "proxy.pid")
c.ConfigurableHTTPProxy.command = [str(ENVIRONMENT / "node_modules/.bin/configurable-http-proxy")]

c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.DummyAuthenticator.password = PASSWORD
if not TOKEN and "HUB_PASSWORD" not in os.environ:
    print(f"The password of every learner is {PASSWORD}", file=sys.stderr)

c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(HUB / "{username}")
c.Spawner.cmd = [str(ENVIRONMENT / "bin/jupyterhub-singleuser")]
c.Spawner.args = ["--allow-root"] if os.geteuid() == 0 else []
c.Spawner.http_timeout = c.Spawner.start_timeout = 600  # thirty servers that start at once share the cores
c.JupyterHub.concurrent_spawn_limit = 0
c.JupyterHub.active_server_limit = 0
c.Spawner.environment = {
    "JUPYTER_PATH": f"{HUB / 'jupyter'}:{COURSE / 'share/jupyter'}",  # the kernel above, and the course's widgets
    "JUPYTER_CONFIG_PATH": str(ROOT / "tools/jupyter"),
    "PYTHONPATH": str(ROOT),
    "HUB": str(HUB),
    "OMP_WAIT_POLICY": "PASSIVE",  # as in the Makefile: waiting threads would take the cores from the ranks
}

# The script that plays learners makes users, starts their servers, and takes a token for each.
if TOKEN:
    c.JupyterHub.services = [{"name": "play", "api_token": TOKEN}]
    scopes = ["admin:users", "admin:servers", "tokens", "access:servers"]
    c.JupyterHub.load_roles = [{"name": "play", "services": ["play"], "scopes": scopes}]
