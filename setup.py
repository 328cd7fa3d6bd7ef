"""The one compiled part: a byte scanner. Without a C compiler the build goes on, and its Python twin serves."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rankscope.analysis.readers._scan",
            ["analysis/readers/_scan.c"],
            define_macros=[("Py_LIMITED_API", "0x030a0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
