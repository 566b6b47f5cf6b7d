"""llama.cpp's server on the workload files, over OpenAI's completions API.

    python benchmarks/peers/llama_server.py --server PATH/llama-server --model FILE.gguf \\
        --workload benchmarks/workloads/W1.json [-- more flags of llama-server]

Any other server of that API is loaded with `octavo bench serve --url`.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

from record import arguments, measure

from octavo.bench.load import Timing, run_open, server_at
from octavo.errors import RequestError
from octavo.simulate.workload import WorkItem


def main() -> None:
    own, more = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1 :]
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--server", default="llama-server", help="the program")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=98_304, help="of all slots together")
    chosen = parser.parse_args(own)
    threads = str(chosen.threads)
    command = [chosen.server, "-m", chosen.model, "-t", threads, "-tb", threads]
    command += ["-np", str(chosen.slots), "-c", str(chosen.context), "--port", str(chosen.port)]
    with subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{chosen.port}"
            wait_for(url, process)
            server = server_at(url)

            def run(items: Sequence[WorkItem]) -> list[Timing]:
                return run_open(server, items, [0.0] * len(items))

            measure(
                chosen,
                f"llama.cpp {version_of(chosen.server)}",
                {"flags": more},
                run,
                tells_first_token=True,
            )
        finally:
            process.terminate()


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Until it lists its models; the model is loaded then."""
    while process.poll() is None:
        try:
            server_at(url)
        except RequestError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"llama-server ended with {process.returncode}")


def version_of(program: str) -> str:
    """What it says of itself."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return next((line for line in lines if line.startswith("version")), "of unknown version")


if __name__ == "__main__":
    main()
