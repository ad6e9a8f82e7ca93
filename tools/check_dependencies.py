"""Check what Plait depends on: `python tools/check_dependencies.py [licences] [vulnerabilities]`, or `make audit`.

Crates are those of Cargo.lock, Python packages those that are installed and that the four distributions need. Licences
are read from their own metadata, without a network. Vulnerabilities are asked of OSV (https://osv.dev), which has those
of RustSec and of PyPI. Exit code 1: a licence or a version is not accepted; 3: the source could not be asked, so
vulnerabilities were NOT checked. ACCEPTED has the advisories that do not concern Plait, each with its reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OURS = ("plait", "plait-worker", "plait-kernels", "plait-proto")
SOURCE = "https://api.osv.dev/v1/querybatch"
SECONDS = 30.0
NOT_CHECKED = 3

LICENCES = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "MIT", "MIT-0", "MPL-2.0"} | {
    "PSF-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
"""SPDX. All may be linked into a server under Apache-2.0; MPL-2.0 asks for nothing where files are not changed."""
EXCEPTIONS = frozenset(["LLVM-exception"])
SPDX = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
}
"""What older metadata says."""
ACCEPTED = {
    "RUSTSEC-2024-0436": "paste is no longer maintained; a macro of the build of tokenizers 0.23, the latest release",
}


@dataclass(frozen=True, order=True, slots=True)
class Package:
    """Something that Plait depends on."""

    ecosystem: str
    """As OSV calls it: `crates.io` or `PyPI`."""
    name: str
    version: str
    licence: str
    """SPDX; empty if it says none."""

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.ecosystem})"


def crates() -> Iterator[Package]:
    """Those of Cargo.lock that are not ours."""
    words = [sys.executable, "tools/cargo.py", "metadata", "--locked", "--format-version", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    for package in json.loads(done.stdout.splitlines()[-1])["packages"]:
        if package["source"] is not None:
            yield Package("crates.io", package["name"], package["version"], package["license"] or "")


def python_packages() -> Iterator[Package]:
    """Those that are installed and that ours need, without extras."""
    known, wanted = set(OURS), list(OURS)
    while wanted:
        found = importlib.metadata.distribution(wanted.pop())
        needed = [Requirement(line) for line in found.requires or ()]
        names = {_normal(each.name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})}
        wanted += names - known
        known |= names
        if (name := _normal(found.metadata["Name"])) not in OURS:
            yield Package("PyPI", name, found.version.partition("+")[0], _licence(found.metadata))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _licence(metadata: Any) -> str:
    """Its SPDX expression; else what older metadata says."""
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if "License ::" in line]
    stated = metadata.get("License-Expression") or metadata.get("License") or " OR ".join(classifiers)
    return SPDX.get(stated, stated)


def is_allowed(licence: str) -> bool:
    """Whether an SPDX expression leaves a choice of allowed licences."""
    tokens = re.findall(r"[()]|[\w.+-]+", licence.replace("/", " OR "))
    try:
        allowed, rest = _either(tokens)
    except IndexError:
        return False
    return allowed and not rest


def _either(tokens: list[str]) -> tuple[bool, list[str]]:
    allowed, tokens = _both(tokens)
    while tokens[:1] == ["OR"]:
        other, tokens = _both(tokens[1:])
        allowed = allowed or other
    return allowed, tokens


def _both(tokens: list[str]) -> tuple[bool, list[str]]:
    allowed, tokens = _one(tokens)
    while tokens[:1] == ["AND"]:
        other, tokens = _one(tokens[1:])
        allowed = allowed and other
    return allowed, tokens


def _one(tokens: list[str]) -> tuple[bool, list[str]]:
    if tokens[0] == "(":
        allowed, tokens = _either(tokens[1:])
        return allowed and tokens[0] == ")", tokens[1:]
    allowed = tokens[0] in LICENCES
    if tokens[1:2] == ["WITH"]:
        return allowed and tokens[2] in EXCEPTIONS, tokens[3:]
    return allowed, tokens[1:]


def unlicensed(packages: list[Package]) -> list[str]:
    """A sentence for each package whose licence is not allowed."""
    return [
        f"{it} has the licence {it.licence!r}, which is not allowed" for it in packages if not is_allowed(it.licence)
    ]


def vulnerable(packages: list[Package], source: str = SOURCE) -> list[str]:
    """A sentence for each advisory that holds for a version and is not accepted; raises `OSError`."""
    queries = [{"package": {"name": it.name, "ecosystem": it.ecosystem}, "version": it.version} for it in packages]
    request = urllib.request.Request(source, json.dumps({"queries": queries}).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            results = json.load(answer)["results"]
        found = [[advisory["id"] for advisory in result.get("vulns", ())] for result in results]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OSError(f"an answer of another form: {error}") from error
    if len(found) != len(packages):
        raise OSError(f"{len(found)} answers to {len(packages)} questions")
    return [
        f"{package} is concerned by {advisory} (https://osv.dev/{advisory})"
        for package, advisories in zip(packages, found, strict=True)
        for advisory in advisories
        if advisory not in ACCEPTED
    ]


def main(argv: list[str]) -> int:
    """Run the checks; the exit code."""
    checks = argv or ["licences", "vulnerabilities"]
    packages = sorted({*crates(), *python_packages()})
    print(f"plait: {len(packages)} packages that Plait depends on")
    problems = unlicensed(packages) if "licences" in checks else []
    code = 0
    if "vulnerabilities" in checks:
        try:
            problems += vulnerable(packages)
        except OSError as error:
            print(f"plait: vulnerabilities were NOT checked: {SOURCE} cannot be asked: {error}", file=sys.stderr)
            code = NOT_CHECKED
    for problem in problems:
        print(f"plait: {problem}", file=sys.stderr)
    if not problems and code == 0:
        print(f"plait: well: {' and '.join(checks)}")
    return 1 if problems else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
