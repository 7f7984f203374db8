"""Backend "c_loop": the recurrent form on NumPy arrays as a loop in C, compiled at its first use.

This file is all that is loaded while hla looks for backends. What costs time or may fail, NumPy and the compiler, waits
until a call needs it.
"""

from __future__ import annotations

from hla.backends import Backend, BackendSpec, Call, Verdict
from hla.problem import Runner

SPEC = BackendSpec(
    name="c_loop",
    families=("numpy",),
    description="one token after another, in C",
    requires=("numpy",),
    pip="hla-plugin-example",
    forms=("recurrent",),
    dtypes=("float32", "float64"),
    gradients=False,
    priority=-10,
)


def probe() -> Verdict:
    """Whether this machine has a C compiler."""
    from hla_plugin_example import compiler

    found = compiler.command()
    if found is None:
        return Verdict(False, "no C compiler: install one, or name it in the variable CC")
    return Verdict(True, f"compiles with {' '.join(found)}")


def supports(call: Call) -> Verdict:
    """Which calls it can run, of those that the spec admits."""
    if "mask=none" in call.options:
        return Verdict(False, "runs forward in time only, so mask 'causal' or 'prefix'")
    if "definition=as_printed" in call.options:
        return Verdict(False, "has only the exact definition")
    return Verdict(True, "supported")


def offers(call: Call) -> Verdict:
    """Whether it wants a call that did not name it."""
    return Verdict(False, "is an example, which runs when it is named")


def check() -> Verdict:
    """A test of itself, for `hla info`: a compiler that is there may not work."""
    from hla_plugin_example import loop

    return loop.check()


def load(operator: str) -> Runner:
    """The function that runs an operator: one for all, as a problem carries its operator's program."""
    from hla_plugin_example import loop

    return loop.run


def backend() -> Backend:
    """What the entry point names."""
    return Backend(
        spec=SPEC,
        load=load,
        probe=probe,
        supports=supports,
        offers=offers,
        check=check,
        plain_form=lambda problem: "recurrent",
    )
