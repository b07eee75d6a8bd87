"""noisegate on a real Flower: a SuperLink and four SuperNodes with TLS, as processes on this machine.

    make flower                                    # installs Flower in an environment of its own, and runs all parts
    python benchmarks/flower_processes.py stream   # 200 rounds over the stream: accuracy, seconds
    python benchmarks/flower_processes.py rejoin   # one ClientApp is killed with -9: rounds go on, and it comes back
    python benchmarks/flower_processes.py message  # 5 rounds of one message each: seconds a round

Each part fails with a message if something does not hold. Everything that is started is ended.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

BIN, ROOT = Path(sys.executable).parent, Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "flower"))
OFF = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ |= OFF
WORKERS = 4


class Flower:
    """A SuperLink, its SuperNodes, and a run. All in one folder; `with` ends every process."""

    def __init__(self, folder: Path, rounds: int, sigma: float) -> None:
        from prepare import prepare

        self.folder, self.processes, self.began = folder, {}, time.monotonic()
        self.ports = free_port(), free_port()
        prepare(folder, WORKERS, self.ports, rounds, sigma)
        self.env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_HOME": str(folder / "flower")}
        self.env["OMP_NUM_THREADS"] = "1"

    def __enter__(self) -> "Flower":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():  # each has a session of its own, with all that it started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def start(self, name: str, *command: object) -> None:
        """Start a process whose output goes to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.folder / "flower",
                start_new_session=True,
            )

    def up(self) -> None:
        """Start the SuperLink, register the nodes' keys, start the SuperNodes."""
        tls = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "superlink.pem", "--ssl-keyfile", "superlink.key")
        self.start(
            "superlink", BIN / "flower-superlink", "--host", "127.0.0.1", "--port", self.ports[1], *tls,
            "--enable-supernode-auth", "--database", "state.db", "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for(lambda: reachable(self.ports[1]), 60, "the SuperLink listens")
        for i in range(WORKERS):
            self.flwr("supernode", "register", f"node{i}.pub", "trial")
            folder = self.folder / "nodes" / str(i)
            self.start(
                f"node{i}", BIN / "flower-supernode", "--superlink", f"127.0.0.1:{self.ports[1]}",
                "--root-certificates", "ca.crt", "--auth-supernode-private-key", f"node{i}",
                "--host", "127.0.0.1", "--port", free_port(), "--node-config", f'folder="{folder}"',
            )  # fmt: skip

    def flwr(self, *words: str) -> str:
        """What a command of `flwr` prints."""
        done = subprocess.run(
            [BIN / "flwr", *words],
            env=self.env,
            cwd=self.folder / "flower",
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, mode: str) -> str:
        """Start the example app. The id of the run."""
        config = f'mode="{mode}" workers={WORKERS} folder="{self.folder / "server"}"'
        told = self.flwr("run", str(ROOT / "examples" / "flower"), "trial", "-c", config, "--format", "json")
        return str(json.loads(told)["run-id"])

    def status(self, run: str) -> str:
        """What Flower says of a run."""
        return str(json.loads(self.flwr("list", "--run-id", run, "trial", "--format", "json"))["runs"][0]["status"])

    def state(self) -> dict:
        """What noisegate's server says of itself."""
        try:
            return json.loads((self.folder / "server" / "state" / "status.json").read_text())
        except FileNotFoundError:
            return {"state": "", "judged": 0, "connected": []}

    def lines(self) -> list:
        """The rounds that were judged."""
        return [
            json.loads(line) for line in (self.folder / "server" / "state" / "rounds.jsonl").read_text().splitlines()
        ]

    def ended(self, run: str, seconds: float) -> dict:
        """Wait for the end of a run, and give noisegate's result."""
        result = self.folder / "server" / "state" / "result.json"
        wait_for(lambda: result.exists() or "failed" in self.status(run), seconds, "the run ends", every=1.0)
        assert result.exists(), self.flwr("log", run, "trial", "--show")
        wait_for(lambda: "finished" in self.status(run), 60, "Flower's run ends", every=1.0)
        assert self.status(run) == "finished:completed", self.flwr("log", run, "trial", "--show")
        return json.loads(result.read_text())

    def check_ledgers(self, result: dict) -> None:
        """Each ledger has charged at least what the server has of its worker, and the server nothing more."""
        from noisegate.federation.certificates import identity_of
        from noisegate.federation.ledger_folder import read_ledger

        for i in range(WORKERS):
            folder = self.folder / "nodes" / str(i)
            name = identity_of((folder / "worker.pem").read_bytes()).name
            charged = len(read_ledger(folder / "ledger")[0].runs[result["run"]].charges)
            received = result["workers"][name]["counter"]
            print(f"  {name}: {charged} rounds charged, {received} uploads received")
            assert received <= charged <= received + 3, (charged, received)


def stream(flower: Flower) -> None:
    """200 rounds over the stream."""
    flower.up()
    began = time.monotonic()
    run = flower.run("stream")
    wait_for(lambda: flower.state()["judged"] > 0, 120, "the first round")
    first = time.monotonic()
    result = flower.ended(run, 300)
    rounds, accuracy = result["judged"], result["accuracy"]
    spent = sorted(sum(line["seconds"].values()) for line in flower.lines())
    print(f"stream: first round {first - began:.1f} s after `flwr run`; {rounds} rounds, accuracy {accuracy:.3f}")
    print(f"stream: a round takes {spent[len(spent) // 2]:.4f} s (median), {spent[-len(spent) // 10]:.4f} s (p90)")
    assert accuracy > 0.6
    flower.check_ledgers(result)


def rejoin(flower: Flower) -> None:
    """One ClientApp is killed. The others go on at once; Flower reports it, and its worker joins again."""
    flower.up()
    run = flower.run("stream")
    wait_for(lambda: flower.state()["judged"] >= 20 and len(flower.state()["connected"]) == WORKERS, 180, "20 rounds")
    victim = client_app_of(flower.processes["node0"].pid)
    os.kill(victim, signal.SIGKILL)
    killed, before = time.monotonic(), flower.state()["judged"]
    wait_for(lambda: flower.state()["judged"] >= before + 20, 60, "rounds go on without it")
    print(f"rejoin: 20 more rounds {time.monotonic() - killed:.1f} s after the kill")
    wait_for(lambda: len(flower.state()["connected"]) == WORKERS, 200, "it joins again", every=0.2)
    again, judged = time.monotonic() - killed, flower.state()["judged"]
    print(f"rejoin: back {again:.1f} s after the kill, after {judged - before} rounds without it")
    result = flower.ended(run, 600)
    missing = {name: each["rounds"]["missing"] for name, each in result["workers"].items()}
    print(f"rejoin: {result['judged']} rounds; missing in {missing}")
    late = [name for name, count in missing.items() if count > 0]
    assert len(late) == 1, missing
    assert flower.lines()[-1]["workers"][late[0]]["status"] in ("used", "refused")
    flower.check_ledgers(result)


def message(flower: Flower) -> None:
    """Five rounds of one message each."""
    flower.up()
    began = time.monotonic()
    run = flower.run("message")
    result = flower.ended(run, 400)
    seconds = sorted(line["seconds"]["wait"] for line in flower.lines())
    print(f"message: {result['judged']} rounds in {time.monotonic() - began:.1f} s with enrollment and start")
    print(f"message: a round takes {seconds[len(seconds) // 2]:.1f} s (median; {seconds[0]:.1f} to {seconds[-1]:.1f})")
    assert result["judged"] == 5
    assert all(each["counter"] == 5 for each in result["workers"].values()), result
    flower.check_ledgers(result)


def client_app_of(supernode: int) -> int:
    """The process id of the one ClientApp that a SuperNode has running."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"flwr-clientapp" in read(path) and os.getsid(int(path.parent.name)) == supernode
    ]
    assert len(found) == 1, found
    return found[0]


def read(path: Path) -> bytes:
    """The bytes of a file; none if its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def reachable(port: int) -> bool:
    """Whether somebody listens on a port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_for(holds, seconds: float, what: str, every: float = 0.1) -> None:
    """Wait until something holds. AssertionError if it does not in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:g} seconds: {what}"
        time.sleep(every)


PARTS = {"stream": (stream, 200, 2.0), "rejoin": (rejoin, 6000, 20.0), "message": (message, 5, 2.0)}
"""Each part, its rounds and its noise: thousands of rounds cost more privacy than the trial's policy allows."""


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--keep", action="store_true", help="keep the folder, with all logs")
    given = parser.parse_args()
    for name in given.parts or PARTS:
        part, rounds, sigma = PARTS[name]
        folder = Path(tempfile.mkdtemp(prefix=f"noisegate-{name}-"))
        try:
            with Flower(folder, rounds, sigma) as flower:
                part(flower)
                print(f"{name}: {time.monotonic() - flower.began:.0f} s in all")
        except AssertionError:
            print(f"the logs are in {folder}")
            raise
        if not given.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
