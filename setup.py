"""The compiled parts: a byte scanner and the replay's loop. Without a C compiler their Python twins serve."""

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
        for folder, name in (("analysis/readers", "_scan"), ("analysis/replay", "_replay"))
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
