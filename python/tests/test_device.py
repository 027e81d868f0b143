# SPDX-License-Identifier: MIT OR Apache-2.0
"""libcbd by ctypes. CBD_LIBRARY names the library, CBD_TEST_FOLDER a folder, CBD_TEST_INCLUDE that of cbd.h."""

from __future__ import annotations

import array
import ctypes
import os
import subprocess
import tempfile
import threading
import unittest

import cbd
from cbd import device, errors

MIB = 1 << 20


class Devices(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=os.environ["CBD_TEST_FOLDER"])
        self.region = os.path.join(self.folder.name, "region")
        self.disk = os.path.join(self.folder.name, "disk")
        with open(self.disk, "wb") as file:
            file.truncate(16 * MIB)

    def tearDown(self) -> None:
        self.folder.cleanup()

    def open(self) -> device.Device:
        return device.open(self.region, self.disk, size=32 * MIB, format=True)

    def on_disk(self, offset: int, length: int) -> bytes:
        with open(self.disk, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def test_what_is_written_is_read_by_every_kind_of_buffer(self) -> None:
        with self.open() as disk:
            data = os.urandom(4096)
            view = memoryview(bytearray(data))
            words = array.array("Q", data)
            kinds = [data, bytearray(data), view, view.toreadonly(), words, (ctypes.c_char * 4096)(*data)]
            for number, buffer in enumerate(kinds):
                disk.write(buffer, number * 4096, fua=number == 1)
                self.assertEqual(disk.read(4096, number * 4096), data, type(buffer))
            into = array.array("Q", bytes(4096))
            disk.read_into(into, 0)
            self.assertEqual(into, words)
            disk.read_into(memoryview(words)[:256].cast("B")[:512], 0)
            disk.write(b"", 0)
            self.assertEqual(disk.read(0, 0), b"")

    def test_discards_and_zeroes_read_as_zeroes(self) -> None:
        with self.open() as disk:
            disk.write(b"x" * 16384, 0)
            disk.discard(0, 4096)
            disk.write_zeroes(4096, 4096, fua=True)
            disk.flush()
            self.assertEqual(disk.read(16384, 0), bytes(8192) + b"x" * 8192)

    def test_data_survives_a_close_and_reaches_the_disk_with_a_drain(self) -> None:
        with self.open() as disk:
            disk.write(b"one " * 1024, 8192)
            self.assertGreaterEqual(disk.status().dirty_bytes, 0)
        with device.Region.open(self.region) as region:
            with region.attach(self.disk) as disk:
                self.assertEqual(disk.read(4096, 8192), b"one " * 1024)
                disk.drain()
                self.assertEqual(self.on_disk(8192, 4096), b"one " * 1024)
                self.assertEqual(disk.status().dirty_bytes, 0)
                disk.write(b"two " * 1024, 8192)
                disk.detach()
            self.assertEqual(self.on_disk(8192, 4096), b"two " * 1024)

    def test_properties_are_those_of_the_library(self) -> None:
        with self.open() as disk:
            geometry = disk.geometry()
            self.assertEqual((geometry.size, geometry.sector, geometry.backend_id), (16 * MIB, 512, 0))
            self.assertTrue(disk.status().cached)
            self.assertIsInstance(disk.warnings(), list)
            self.assertEqual(disk.grow(), 16 * MIB)
            with open(self.disk, "r+b") as file:
                file.truncate(17 * MIB)
            self.assertEqual((disk.grow(), disk.geometry().size), (17 * MIB, 17 * MIB))
            disk.write(os.urandom(MIB), 0)
            verified = disk.verify(0, 2 * MIB, level="agree", findings_max=0)
            self.assertEqual((verified.found, verified.findings), (0, []))
            self.assertGreaterEqual(verified.cache_bytes + verified.backing_bytes, 2 * MIB)
        self.assertRegex(device.version(), r"^\d+\.\d+\.\d+$")
        with device.Region.open(self.region) as region:
            info = region.info()
            self.assertEqual((info.size, info.power_fail), (32 * MIB, False))
            self.assertTrue(info.warnings and len(info.uuid) == 36, info)

    def test_wrong_arguments_are_errors_and_change_nothing(self) -> None:
        with self.open() as disk:
            disk.write(b"x" * 4096, 0)
            for wrong in [
                lambda: disk.write(b"x", 0),
                lambda: disk.write(b"x" * 512, 1),
                lambda: disk.write(b"x" * 512, -512),
                lambda: disk.write(b"x" * 512, 1 << 64),
                lambda: disk.write(memoryview(bytearray(1024))[::2], 0),
                lambda: disk.write(b"x" * 512, 16 * MIB),
                lambda: disk.read(512, 1 << 63),
                lambda: disk.read(-1, 0),
                lambda: disk.read_into(b"x" * 512, 0),
                lambda: disk.discard(0, 1),
                lambda: disk.drain(-1),
                lambda: disk.verify(level="most"),  # type: ignore[arg-type]
            ]:
                with self.assertRaises(cbd.Error):
                    wrong()
            with self.assertRaises(TypeError):
                disk.write("text", 0)
            self.assertEqual(disk.read(4096, 0), b"x" * 4096)

    def test_errors_have_a_class_and_a_text(self) -> None:
        with self.assertRaises(errors.NotFound) as caught:
            device.Region.open(os.path.join(self.folder.name, "none"))
        self.assertIn("there is no region", str(caught.exception))
        with self.assertRaises(errors.InvalidArgument):
            device.Region.open("a\0b")
        with self.open(), self.assertRaisesRegex(errors.Busy, "in use"):
            device.Region.open(self.region)

    def test_handles_are_closed_from_the_inside_out_and_not_used_afterwards(self) -> None:
        region = device.Region.open(self.region, size=32 * MIB, format=True)
        disk = region.attach(self.disk)
        with self.assertRaises(errors.Busy):
            region.close()
        self.assertEqual(disk.read(512, 0), bytes(512))
        disk.close()
        disk.close()
        for use in [lambda: disk.read(512, 0), lambda: disk.flush(), lambda: disk.geometry()]:
            with self.assertRaisesRegex(errors.InvalidArgument, "closed"):
                use()
        region.close()
        region.close()
        with self.assertRaisesRegex(errors.InvalidArgument, "closed"):
            region.info()

    def test_a_child_of_fork_is_refused_and_disturbs_nothing(self) -> None:
        with self.open() as disk:
            child = os.fork()
            if child == 0:
                try:
                    disk.read(512, 0)
                except errors.Unsupported:
                    disk.close()
                    os._exit(7)
                os._exit(1)
            _, status = os.waitpid(child, 0)
            self.assertEqual(os.WEXITSTATUS(status), 7)
            disk.write(b"y" * 512, 0)
            self.assertEqual(disk.read(512, 0), b"y" * 512)

    def test_threads_share_a_device(self) -> None:
        failed = []

        def work(number: int) -> None:
            block = bytes([number]) * 4096
            for turn in range(100):
                at = (number * 100 + turn) * 4096
                disk.write(block, at)
                if disk.read(4096, at) != block:
                    failed.append(at)

        with self.open() as disk:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        self.assertEqual(failed, [])


class Layout(unittest.TestCase):
    def test_structures_are_those_of_the_header(self) -> None:
        lines = []
        for name, structure in device.STRUCTURES.items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            for field in structure._fields_:
                lines.append(f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));')
        source = "#include <stdio.h>\n#include <cbd.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "layout")
            include = "-I" + os.environ["CBD_TEST_INCLUDE"]
            subprocess.run(["cc", include, "-x", "c", "-o", program, "-"], input=source.encode(), check=True)
            said = subprocess.run([program], stdout=subprocess.PIPE, check=True).stdout.decode()
        for line in said.splitlines():
            place, value = line.split()
            name, _, field = place.partition(".")
            structure = device.STRUCTURES[name]
            found = getattr(structure, field).offset if field else ctypes.sizeof(structure)
            self.assertEqual(found, int(value), place)
        self.assertGreater(len(said.splitlines()), 60)


if __name__ == "__main__":
    unittest.main()
