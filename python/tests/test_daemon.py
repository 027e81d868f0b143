# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client and a daemon: every operation, and answers without a field that this package does not know.

CBD_SOCKET names the daemon's socket, CBD_TEST_FOLDER a folder for disks, CBD_TEST_REGION the path of a region to be made.
"""

from __future__ import annotations

import os
import time
import unittest
from typing import Any, List

import cbd
from cbd import api, errors

FOLDER = os.environ["CBD_TEST_FOLDER"]
MIB = 1 << 20


def unknown(value: Any, at: str = "answer") -> List[str]:
    """The fields of an answer that this package does not know."""
    if isinstance(value, api.Object):
        found = [f"{at}.{name}" for name in value.extra]
        for name, item in vars(value).items():
            found += unknown(item, f"{at}.{name}") if name != "extra" else []
        return found
    if isinstance(value, list):
        return [found for item in value for found in unknown(item, f"{at}[]")]
    return []


class Daemon(unittest.TestCase):
    def setUp(self) -> None:
        self.client = cbd.connect()

    def known(self, value: Any) -> Any:
        """The answer, in which every field is known."""
        self.assertEqual(unknown(value), [])
        return value

    def disk(self, name: str) -> str:
        path = os.path.join(FOLDER, name)
        with open(path, "wb") as file:
            file.truncate(64 * MIB)
        return path

    def test_every_operation(self) -> None:
        client = self.client
        region = os.environ["CBD_TEST_REGION"]
        registered = self.known(client.register_transport("node0", region, size=96 * MIB, format=True))
        self.assertEqual(registered.transport_id, 0)
        path = self.disk("one")
        started = self.known(client.start_backend(path, cache_size=16 * MIB, name="one", export="nbd:unix:" + FOLDER + "/s"))
        self.assertEqual(started.backend_id, 0)
        self.known(client.start_backend(self.disk("two"), cache_size=16 * MIB))
        self.assertEqual(self.known(client.list_blkdev_users()), [])
        self.devices()
        self.backends(path)
        self.pins_and_scrubs()
        self.known(client.grow_transport())
        self.assertEqual([host.hostname for host in self.known(client.list_hosts())], ["node0"])
        self.status(path)
        for backend in ["one", 1]:
            done = self.known(client.stop_backend(backend, verify=True).result())
            self.assertEqual(done.discarded_bytes, 0)
        client.unregister_transport(0)
        self.assertEqual(client.list_transports(), [])

    def devices(self) -> None:
        client = self.client
        made = self.known(client.start_blkdev("one", export="nbd:unix:" + FOLDER + "/nbd", name="front"))
        self.assertTrue(made.alive)
        changed = self.known(client.set_blkdev("front", class_="metadata"))
        self.assertEqual(changed.class_, "metadata")
        self.assertEqual([each.blkdev_id for each in self.known(client.list_blkdevs())], [made.blkdev_id])
        self.known(client.stop_blkdev(made.blkdev_id))
        with self.assertRaises(errors.NotFound):
            client.stop_blkdev(99)

    def backends(self, path: str) -> None:
        client = self.client
        changed = self.known(client.set("one", gc_percent=70, read_fill="off", scrub_every_s=86_400))
        self.assertEqual((changed.gc_percent, changed.read_fill, changed.scrub_every_s), (70, "off", 86_400))
        self.known(client.resize_cache("one", 24 * MIB).result())
        self.known(client.detach_cache("one").result())
        self.known(client.attach_cache("one", 16 * MIB, cache_mode="writeback"))
        grown = self.known(client.grow_backend("one"))
        self.assertEqual((grown.backend_path, grown.before), (path, grown.now))
        self.known(client.checkpoint(wait=True).result())
        moment = self.known(client.checkpoint_together([0, 1], hold_s=1).result()).moment
        self.assertGreater(moment.held_until_ms, moment.at_ms)
        self.known(client.set(0, writeback_pause_s=0))
        self.known(client.set(1, writeback_pause_s=0))
        for progress in client.drain(backend="one", verify=True):
            self.known(progress)

    def pins_and_scrubs(self) -> None:
        client = self.client
        pin = api.NewPin(kind="range", name="0+1M", ranges=[api.RangeInfo(start=0, end=MIB)])
        pinned = self.known(client.pin("one", [pin]))
        self.assertEqual((pinned.pinned_bytes, pinned.pins[0].name), (MIB, "0+1M"))
        self.assertEqual(self.known(client.pins("one")), pinned)
        self.assertEqual(self.known(client.unpin("one", all=True)).pins, [])
        verified = self.known(client.verify("one", length=MIB, level="agree").result()).verified
        self.assertEqual((verified.found, verified.verified_bytes), (0, MIB))
        # A scrub that the daemon started by itself may run.
        self.known(client.set("one", scrub_every_s=0))
        deadline = time.monotonic() + 60
        while self.known(client.scrub_info("one")).state != "idle":
            self.assertLess(time.monotonic(), deadline, "the scrub does not end")
            time.sleep(0.1)
        done = self.known(client.scrub("one", "start", wait=True).result())
        self.assertEqual(done.scrub.last.results.found, 0)
        self.assertEqual(self.known(client.scrub_info("one")).state, "idle")

    def status(self, path: str) -> None:
        client = self.client
        status = self.known(client.status())
        self.assertEqual(status.pid, int(os.environ["CBD_TEST_PID"]))
        backend = status.transports[0].backends[0]
        self.assertEqual((backend.backend_path, backend.name, backend.alive), (path, "one", True))
        self.assertEqual(backend.cache.size, 16 * MIB)
        self.assertEqual(len(self.known(client.status(backend="one")).transports[0].backends), 1)
        self.assertIn("cbd_", client.metrics())
        self.assertEqual(len(self.known(client.list_backends(all=True))), 2)
        self.assertEqual(len(self.known(client.list_transports())), 1)

    def test_events_come_in_lines(self) -> None:
        lines = self.known(list(self.client.events()))
        self.assertIsNotNone(lines[0].begin)
        self.assertIsNotNone(lines[-1].end)
        self.assertIn("daemon.started", [line.event.name for line in lines if line.event])
        with self.client.events(follow=True, since=0) as followed:
            self.assertEqual(next(followed).begin.instance, lines[0].begin.instance)
            self.assertEqual(next(followed).event.name, "daemon.started")

    def test_what_the_daemon_refuses_is_an_error_of_its_kind(self) -> None:
        with self.assertRaises(errors.NotFound):
            self.client.set(7, transport=9, gc_percent=70)
        with self.assertRaises(errors.InvalidArgument):
            self.client.register_transport("node0", "relative")
        with self.assertRaises(errors.NotFound):
            self.client.status(transport=9)


if __name__ == "__main__":
    unittest.main()
