"""The compiled parts: a byte scanner, the cut into phases, the replay's loop. Without a compiler their twins serve."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"rankscope.{folder.replace('/', '.')}.{name}",
            [f"{folder}/{name}.c"],
            define_macros=[("Py_LIMITED_API", "0x030a0000")],
            py_limited_api=True,
            optional=True,
        )
        for folder, name in (
            ("analysis/readers", "_scan"),
            ("analysis/timeline", "_phases"),
            ("analysis/replay", "_replay"),
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
