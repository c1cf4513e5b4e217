"""What of a server can be reached from outside its own processes: one port, on the loopback, and nothing else."""

import stat
from pathlib import Path

import psutil

from tests.faults.launched import Launched


def test_one_port_and_one_private_directory(server: Launched) -> None:
    processes = [server.api, *server.children()]
    connections = [each for process in processes for each in process.net_connections("inet")]
    listening = {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", server.port)}
    paths = {str(each.laddr) for process in processes for each in process.net_connections("unix")}
    directories = {Path(path).parent for path in paths if path.startswith("/")}
    assert directories and all(stat.S_IMODE(directory.stat().st_mode) == 0o700 for directory in directories)
