# SPDX-License-Identifier: Apache-2.0
"""Every error this project raises on purpose.

VTokenError
├── OptionError       (ValueError)    an option is unknown or out of range; says what to change
├── UnsupportedError  (RuntimeError)  engine, model or platform is not on the allow-list
├── PolicyError       (ValueError)    a policy raised, or its scores cannot be ranked
├── PlanError         (ValueError)    a relocation plan does not fit the table it names
└── InvariantError    (RuntimeError)  one of I1-I8 does not hold; never caught and ignored
"""


class VTokenError(Exception):
    """Base of all errors of this project."""


class OptionError(VTokenError, ValueError):
    """An option is unknown or out of range. The message names it and the way out."""


class UnsupportedError(VTokenError, RuntimeError):
    """The engine's configuration is not on the allow-list (design: start only when proven)."""


class PolicyError(VTokenError, ValueError):
    """A policy raised, or its scores have a wrong shape or are not numbers."""


class PlanError(VTokenError, ValueError):
    """A relocation plan does not fit the table it was validated against."""


class InvariantError(VTokenError, RuntimeError):
    """One of the invariants I1-I8 is broken."""
