# SPDX-License-Identifier: BSD-3-Clause
"""The faults still fit the engine: what each replaces stands there once, and is not what it becomes."""
import pathlib
import unittest

from faults import FAULTS

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Faults(unittest.TestCase):
    def test_text_stands_there_once(self):
        for name, file, text, _ in FAULTS:
            with self.subTest(name):
                self.assertEqual((ROOT / file).read_text(encoding="utf-8").count(text), 1)

    def test_becomes_something_else(self):
        for name, _, text, replacement in FAULTS:
            with self.subTest(name):
                self.assertNotEqual(text, replacement)

    def test_names_differ(self):
        self.assertEqual(len({fault[0] for fault in FAULTS}), len(FAULTS))


if __name__ == "__main__":
    unittest.main()
