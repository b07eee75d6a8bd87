"""Everything noisegate raises on purpose.

NoisegateError
├── SpecError      a setting has a wrong name, type or value (also a ValueError)
├── DataError      a data set is missing, damaged, or does not fit
├── PrivacyError   a guarantee that was asked for cannot be given
├── StoreError     a folder cannot be written, read or resumed
├── PolicyError    a worker's own policy forbids what a server asks for
└── FederationError  a peer of a federation cannot be reached, or is not who it must be

NoisegateWarning is what noisegate warns of on purpose; nothing was refused.

A message says what, which value, which rule, and what to do. The command line prints it on one line and exits with 2.
"""

NO_REGRESSION = (
    "noisegate trains classifiers, and there is no regression: numpy.digitize(y, edges) makes classes of numbers"
)
"""What is said wherever labels are no classes."""


class NoisegateError(Exception):
    """Base of every error that noisegate raises on purpose."""


class SpecError(NoisegateError, ValueError):
    """A setting has a wrong name, type or value."""


class DataError(NoisegateError):
    """A data set is missing, damaged, or does not fit the request."""


class PrivacyError(NoisegateError):
    """A privacy guarantee that was asked for cannot be given."""


class StoreError(NoisegateError):
    """A folder cannot be written, read or resumed."""


class PolicyError(NoisegateError):
    """A worker's own policy forbids what a server asks for."""


class FederationError(NoisegateError):
    """A peer of a federation cannot be reached, or is not who it must be."""


class NoisegateWarning(UserWarning):
    """Something that is allowed, and rarely meant."""


class SlowWarning(NoisegateWarning):
    """A long run makes every example's gradient by itself, which another model would not need."""


class OneClassWarning(NoisegateWarning):
    """A model predicts nearly one class, which its accuracy does not show."""
