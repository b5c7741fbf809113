"""`make soak`: 20 peers, 200 rounds on digits, while three of them are killed and restarted at random.

The same federation runs twice, undisturbed and disturbed, and must end both times, with accuracies that differ by at
most two points. Each peer is a process of its own on loopback, over mutual TLS.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from semidfl.node.local import Local, free_ports, new_federation
from semidfl.record.folder import read_records

POINTS = 2.0


def federation(folder: Path, peers: int, rounds: int, seed: int) -> Local:
    places = zip(("LMUU"[k % 4] for k in range(peers)), free_ports(peers), strict=True)
    members = {f"p{k:02d}": (role, f"127.0.0.1:{port}") for k, (role, port) in enumerate(places)}
    # Light, so that the network is what is tried: few steps, pseudo-labels for the last quarter, no generator.
    config = {"rounds": rounds, "data.alpha": 1.0, "generator.kind": "none", "classifier.iterations": 5}
    config["compute.report"] = False
    config["pseudo.start"] = 3 * rounds // 4
    made = new_federation(
        folder,
        members,
        {"name": "soak", "recipe": "demo", "dataset": "digits", "topology": "random-regular", "seed": seed},
        {
            "config": config,
            "deadlines": {"hello": 300, "round": 4, "transfer": 20, "linger": 60, "alone": 600},
        },
    )
    return Local(folder, made, ("--compute.threads", "1", "--compute.device", "cpu"))


def last_round(local: Local, name: str) -> int:
    records = read_records(local.run_folder(name))
    return records[-1]["round"] if records else 0


def disturb(local: Local, victims: list[str], rounds: int, draw: random.Random, limit: float) -> int:
    """Kills one of the victims now and then and starts it again a little later, until the end is near."""
    kills, until = 0, time.monotonic() + limit
    others = [peer.name for peer in local.federation.peers if peer.name not in victims]
    while (now := max(last_round(local, name) for name in others[:3])) < rounds - 15:
        assert time.monotonic() < until, f"round {now} after {limit:g} s"
        time.sleep(draw.uniform(2, 10))
        victim = draw.choice(victims)
        if now < 5 or local.processes[victim].poll() is not None:
            continue
        local.processes[victim].kill()
        local.processes[victim].wait()
        kills += 1
        time.sleep(draw.uniform(0, 4))
        local.start(victim)
    return kills


def run(folder: Path, args: argparse.Namespace, disturbed: bool) -> dict[str, float]:
    started = time.monotonic()
    with federation(folder, args.peers, args.rounds, args.seed) as local:
        local.start_all()
        kills = 0
        if disturbed:
            draw = random.Random(args.seed)
            kills = disturb(local, draw.sample(list(local.processes), 3), args.rounds, draw, args.limit)
        codes = local.wait(args.limit)
        assert not any(codes.values()), codes
        summaries = [local.summary(name) for name in local.processes]
    scores = [statistics.fmean(s["held_out_accuracy"]) for s in summaries]
    return {
        "accuracy": 100 * statistics.fmean(scores),
        "lowest": 100 * min(scores),
        "seconds": time.monotonic() - started,
        "kills": kills,
        "fewest_rounds": min(s["rounds"] for s in summaries),
        "rounds_with_somebody_missing": sum(s["rounds_with_missing"] for s in summaries),
        "refused": sum(sum(s["refused"].values()) for s in summaries),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a run has failed")
    parser.add_argument("--scratch", default=None, help="folder for the peers' files, as /dev/shm")
    parser.add_argument("--against", type=float, help="accuracy of an undisturbed run that was made before")
    args = parser.parse_args()
    found = {} if args.against is None else {"undisturbed": {"accuracy": args.against}}
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        for what in [what for what in ("undisturbed", "disturbed") if what not in found]:
            found[what] = run(Path(name) / what, args, what == "disturbed")
            print(f"{what}: {json.dumps(found[what])}", flush=True)
    gap = found["disturbed"]["accuracy"] - found["undisturbed"]["accuracy"]
    print(f"disturbed minus undisturbed: {gap:+.2f} points (wanted: at least {-POINTS:g})")
    sys.exit(gap < -POINTS)


if __name__ == "__main__":
    main()
