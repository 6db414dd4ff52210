"""Compute the seconds of one optimizer step in closed form, from parameters with priors.

A step has s micro-steps of t seconds each. n is the number of devices, and m the number of
machines. k is the number of devices that a machine uses. If machines differ, t belongs to the
slowest machine, and C uses the largest k. G is the bytes of all gradients.

    step = s t - f t + ((f t)^p + (C - L)^p)^(1/p) + L + optimizer
    t    = max(T1(b) [1 + sigma h (T1(b) / T1(b0))^eta], H)
    h    = ((k - 1)/3)^q
    C    = max(u beta(m) 2 (n - 1)/n G / R, u' (k / 2)^c 2 (k - 1)/k G / R')
           + alpha m (1 + G / 25 MiB)

Both maxima are smooth. p, q, sigma, eta, u, beta, u', c and alpha are learned parameters; see
PARAMETERS. The other symbols are:

- T1(b): the seconds of a device for a forward and a backward pass of b samples (single_device.py).
  b0 is the middle batch: the median of the batches that were measured for the workload.
- h: how much k devices of a machine slow each other down, relative to four devices. h is 0 for one
  device and 1 for four. q is between 1 and 2, because few devices hardly exhaust the shared
  resources [D].
- H: the seconds that the machine's CPU needs in a micro-step, proportional to k - 1.
- f t: the seconds of compute during which communication can run.
- C: the seconds to exchange all gradients. A ring sends between machines and inside them at the
  same time, so only its slowest link counts [D]. R is the usable rate of the slowest link between
  machines (usable_gbps). R' is the rate of the slowest link inside a machine. The term with alpha
  is the latency of the collectives. A collective exchanges a bucket, usually of 25 MiB. C accounts
  for strategies that send more or fewer bytes than DDP (bytes_sent.py). Compression and Adasum add
  their computation to C and L.
- L: the seconds to exchange the last bucket, during which nothing is computed. L equals C if the
  backward pass waits for the exchange.

If every micro-step exchanges gradients, the terms with f, C and L count once per micro-step. If
gradient buckets were profiled, the profile replaces the prior means of f and of the size of the
last bucket. On hosts with less than one core and no accelerator, alpha is divided by the number of
cores. All values are arrays with an entry per setup. [D] marks relations that were derived for
Srift and are in no paper.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, logit

from ..domain.numeric import FloatArray, IntArray
from .single_device import Parameter

_BYTES, BUCKET = 1e8, 25 << 20
_BYTES_PER_GBIT, _POWER = 1.25e8, 4.0
_STEP = 1e-4  # step of finite differences
RDMA_GBPS = 100.0  # from this rate, collectives use RDMA (EFA, InfiniBand) instead of TCP


# Seconds of exchanges between machines vary by a factor of two between kinds of device, and by 1.2
# between workloads on a kind. The standard deviations of other parameters are in proportion.
PARAMETERS: dict[str, Parameter] = {
    # log of (time of an exchange between machines / time at the usable rate)
    "log_scale": Parameter(0.0, 0.0, 0.6, 0.2, strategy=0.5, library=0.7),
    # slope of log time in 1 - 2 / m: the growth with the number of machines m levels off
    "machines": Parameter(0.15, 0.0, 0.3, 0.1, library=0.3),
    # added to log time for two machines, which use a different all-reduce algorithm
    "two": Parameter(0.2, 0.0, 0.4, 0.1, library=0.3),
    # log seconds to launch the exchange of a bucket: 20 to 300 microseconds [D]
    "log_alpha": Parameter(-8.0, 0.0, 0.4, 0.3, strategy=0.7, library=0.7),
    "log_sharpness": Parameter(0.7, 0.4, 0.3, 0.2),  # log(p - 1)
    "log_last": Parameter(-0.7, 0.5, 0.2, 0.2),  # log of (the last bucket's size / 25 MiB)
    "log_inside": Parameter(0.6, 1.0, 0.8, 0.3, strategy=0.5),
    # slope of log time inside a machine in the log of the fullest machine's devices
    "inside_devices": Parameter(0.3, 0.6, 0.6, 0.4),
    "logit_hidden": Parameter(0.5, 1.0, 0.5, 0.5, strategy=0.7),
    "log_slowdown": Parameter(-2.5, 0.8, 0.5, 0.4),
    "slowdown_batch": Parameter(0.0, 0.3, 0.2, 0.2),
    "log_crowding": Parameter(-1.0, 0.5, 0.4, 0.4),  # log(q - 1)
    # log of (H on a machine of four devices / T1(b0))
    "log_host": Parameter(-2.3, 0.8, 0.5, 0.6),
    # log of (seconds of selection / seconds from bytes_sent.py)
    "log_selection": Parameter(0.0, 0.0, strategy=0.7),
}
NAMES = tuple(PARAMETERS)
MEAN = np.array([parameter.mean for parameter in PARAMETERS.values()])


@dataclass(frozen=True, kw_only=True)
class Line:
    """The inputs of the formula, with a row per setup.

    Arrays whose comment says (rows, members) have a column per member of the setup. A member is one
    machine, or `count` equal machines. All other arrays have the shape (rows,).
    """

    alone_s: FloatArray  # (rows, members) T1(b); 0 for padding
    middle_s: FloatArray  # (rows, members) T1(b0); 1 for padding
    optimizer_s: FloatArray  # (rows, members) seconds of the optimizer
    devices: FloatArray  # (rows, members) devices used on the machine
    count: FloatArray  # (rows, members) number of equal machines of the member
    accumulation: FloatArray  # number of micro-steps in a step
    gradient_bytes: FloatArray  # bytes of all gradients
    bucket_bytes: FloatArray  # bytes of a bucket, which one collective exchanges
    gbps: FloatArray  # Gbit/s of the slowest link between machines
    inside_gbps: FloatArray  # Gbit/s of the slowest link inside a machine
    core: FloatArray  # cores of the smallest host, at most 1; 1 with accelerators
    # logit of f from a profile, minus the prior mean of that logit; 0 without a profile
    hidden: FloatArray
    # log of the last bucket's size from a profile, minus its prior mean; 0 without a profile
    last_bucket: FloatArray
    sent_between: FloatArray  # bytes that a machine sends to others, divided by 2 (n - 1)/n G
    selection_s: FloatArray  # seconds of compression or of Adasum
    repeated: FloatArray  # exchanges before the last micro-step, relative to those in the last

    @property
    def ranks(self) -> FloatArray:
        ranks: FloatArray = (self.devices * self.count).sum(axis=1)
        return ranks


@dataclass(frozen=True)
class Times:
    """The seconds of a step and of its parts; all arrays are (rows,).

    - `compute_s`: the compute time of the slowest rank
    - `mean_compute_s`: the mean compute time of all ranks
    - `communication_s`: the time of all exchanges, including those that run during compute
    - `slowest`: the position of the member with the slowest ranks. A member of a cluster is one
      machine, or several equal machines (see `Line`).
    """

    step_s: FloatArray
    compute_s: FloatArray
    mean_compute_s: FloatArray
    communication_s: FloatArray
    slowest: IntArray

    @property
    def compute_share(self) -> FloatArray:
        """Return the fraction of the step spent on compute."""
        return np.minimum(self.compute_s / self.step_s, 1.0)


def known_overlap(
    hidden_part: FloatArray, last_bucket_bytes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the fields `hidden` and `last_bucket` of `Line` for profiled gradient buckets.

    `hidden` is the logit of `hidden_part`, minus the prior mean of this logit. `last_bucket` is the
    log of the last bucket's size in units of 25 MiB, minus the prior mean of this log. An unknown
    argument (NaN) gives 0.

    hidden_part: fraction of a one-device step during which exchanges can run.
    last_bucket_bytes: size of the gradient bucket that is ready last.
    """
    hidden = logit(np.clip(hidden_part, 0.02, 0.98)) - PARAMETERS["logit_hidden"].mean
    last = np.log(np.maximum(last_bucket_bytes, 1.0) / BUCKET) - PARAMETERS["log_last"].mean
    return np.nan_to_num(hidden), np.nan_to_num(last)


def step_times(line: Line, values: FloatArray) -> Times:
    """Return the seconds of each step, computed by the module's equations.

    `values` (rows, parameters) are the parameters of each row, in the order of NAMES.
    """
    value = dict(zip(NAMES, values.T, strict=True))
    micro = compute_seconds(line, value)
    whole, end = exchange_seconds(line, value)
    slowest = micro.argmax(axis=1)
    busy_s = line.accumulation[:, None] * micro + line.optimizer_s
    row = np.arange(len(slowest))
    last, compute = micro[row, slowest], busy_s[row, slowest]
    hidden = last * expit(value["logit_hidden"] + line.hidden)
    early = np.maximum(whole - end, 0.0)
    power = 1 + np.exp(np.minimum(value["log_sharpness"], 4.0))
    step = compute + (_slower(hidden, early, power) - hidden + end) * (1 + line.repeated)
    mean = (busy_s * line.devices * line.count).sum(axis=1) / line.ranks
    return Times(step, compute, mean, whole * (1 + line.repeated), slowest)


def slopes(line: Line, values: FloatArray, log_step: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return two arrays of derivatives of log step seconds, computed as finite differences.

    1. (rows, parameters) derivatives with respect to each parameter
    2. (rows,) derivatives with respect to log T1, if T1 of all machines changes together

    Args:
        line: the inputs of the formula.
        values: (rows, parameters) the parameters of the formula in each row.
        log_step: (rows,) log step seconds with these parameters.
    """
    found = np.empty(values.shape)
    for at in range(len(NAMES)):
        moved = values.copy()
        moved[:, at] += _STEP
        found[:, at] = np.log(step_times(line, moved).step_s)
    longer = replace(line, alone_s=line.alone_s * np.exp(_STEP))
    alone = np.log(step_times(longer, values).step_s)
    return (found - log_step[:, None]) / _STEP, (alone - log_step) / _STEP


def compute_seconds(line: Line, value: dict[str, FloatArray]) -> FloatArray:
    """Return a (rows, members) array: the compute seconds t of a micro-step.

    `value` has a (rows,) array for each parameter name.
    """
    tall = {name: each[:, None] for name, each in value.items()}
    others = np.maximum(line.devices - 1, 0) / 3
    power = 1 + np.exp(np.minimum(tall["log_crowding"], 0.0))
    ratio = np.maximum(line.alone_s / line.middle_s, 1e-6)
    # a slope below -1 would let a smaller batch take longer
    slower = 1 + np.exp(
        np.minimum(tall["log_slowdown"], 3.0)
    ) * others**power * ratio ** np.maximum(tall["slowdown_batch"], -1)
    busy_s = line.alone_s * slower
    host_s = line.middle_s * np.exp(np.clip(tall["log_host"], -20, 3)) * others
    return np.where(line.alone_s > 0, _slower(busy_s, host_s), 0.0)


def _slower(a: FloatArray, b: FloatArray, power: FloatArray | float = _POWER) -> FloatArray:
    """Return a smooth maximum, (a^power + b^power)^(1/power)."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return top * ((a / top) ** power + (b / top) ** power) ** (1 / power)


def usable_gbps(nominal: FloatArray) -> FloatArray:
    """Return the rate that collectives reach on a link of `nominal` Gbit/s.

    Below 100 Gbit/s, collectives use TCP. The result is then the nominal rate, but at most 15. On
    links of 50 Gbit/s, rates between 7 and 27 were measured. From 100 Gbit/s, collectives use RDMA
    and reach 60 % of the nominal rate (measured on p4d, p5 and ND40rs).
    """
    return np.where(nominal < RDMA_GBPS, np.minimum(nominal, 15.0), 0.6 * nominal)


def exchange_seconds(line: Line, value: dict[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return (C, L), two (rows,) arrays of seconds.

    C is for the exchange of all gradients, and L for the exchange of the last bucket alone. If the
    backward pass waits for the exchange, the last bucket has all gradients. Both include the
    seconds of compression or of Adasum.
    """
    machines, ranks, most = line.count.sum(axis=1), line.ranks, line.devices.max(axis=1)
    across = machines > 1
    rate = np.log(usable_gbps(line.gbps))
    between = value["log_scale"] + value["machines"] * (1 - 2 / np.maximum(machines, 2)) - rate
    between = between + value["two"] * (machines == 2)
    crowd = value["inside_devices"] * np.log(most / 2)
    inside = np.exp(np.clip(value["log_inside"] + crowd - np.log(line.inside_gbps), -30, 30))
    unit_s = 2 * _BYTES / _BYTES_PER_GBIT
    sent = line.sent_between * (ranks - 1) / ranks * across * np.exp(np.clip(between, -30, 30))
    carry_s = unit_s * _slower(sent, (most - 1) / most * inside)
    start_s = across * np.exp(value["log_alpha"]) * machines / line.core
    size = np.log(line.gradient_bytes / _BYTES)
    last = np.log(line.bucket_bytes / _BYTES) + value["log_last"] + line.last_bucket
    whole, end = (
        carry_s * np.exp(log_size) + start_s * (1 + np.exp(log_size) * _BYTES / line.bucket_bytes)
        for log_size in (size, np.minimum(size, last))
    )
    selection_s = line.selection_s * np.exp(np.clip(value["log_selection"], -30, 30))
    return whole + selection_s, end + selection_s
