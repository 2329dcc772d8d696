"""The Python side of scheduler_parity_test.cpp: `scheduler_peer.py FOLDER`.

Writes averaged models to swa.pt. For each case, with the schedulers of scheduler_cases.cpp under the same names:
steps it and writes the learning rates and momenta to rates.json, and the state
in the middle to states.json and, as a snapshot, to python-NAME.pt. Then goes on
from the snapshot cpp-NAME.pt that C++ has written in the middle, and writes
these rates to continued.json.
"""
import collections
import json
import math
import sys
import warnings

import torch
from torch.optim import lr_scheduler as lr
from torch.optim import swa_utils
from torch.optim.swa_utils import SWALR

FOLDER = sys.argv[1]
STEPS = 60
MIDDLE = 25
# No optimizer steps here, and SequentialLR uses its schedulers' step(epoch).
warnings.simplefilter("ignore")


def metric(step):
    return (1.0 / (1 + step) if step < 8
            else 0.11 if step < 40 else 0.05 + step * 1e-3)


def falling(epoch):
    return 1.0 / (1 + epoch)


def power(epoch):
    return 0.95 ** epoch


def nearly(epoch):
    return 0.5 if epoch % 7 == 0 else 1.01


def warmup(o):
    return lr.LinearLR(o, 0.1, total_iters=5)


def cosine(o):
    return lr.CosineAnnealingLR(o, 40, 1e-3)


def sequence(o, schedulers, milestones):
    return lr.SequentialLR(o, [make(o) for make in schedulers], milestones)


def chain(o, schedulers):
    return lr.ChainedScheduler([make(o) for make in schedulers])


def cyclic(o, **options):
    return lr.CyclicLR(o, **{"base_lr": 0.01, "max_lr": 0.1, **options})


CASES = {
    "step": lambda o: lr.StepLR(o, 7),
    "step_gamma": lambda o: lr.StepLR(o, 3, 0.9),
    "step_added": lambda o: lr.StepLR(o, 4, 0.7),
    "multi_step": lambda o: lr.MultiStepLR(o, [30, 5, 30, 50], 0.3),
    "multi_step_empty": lambda o: lr.MultiStepLR(o, []),
    "constant": lr.ConstantLR,
    "constant_long": lambda o: lr.ConstantLR(o, 0.3, 40),
    "linear": lr.LinearLR,
    "linear_down": lambda o: lr.LinearLR(o, 0.9, 0.1, 37),
    "linear_added": lambda o: lr.LinearLR(o, total_iters=30),
    "exponential": lambda o: lr.ExponentialLR(o, 0.93),
    "exponential_added": lambda o: lr.ExponentialLR(o, 0.9),
    "polynomial": lr.PolynomialLR,
    "polynomial_power": lambda o: lr.PolynomialLR(o, 45, 2.5),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 50),
    "cosine_again": lambda o: lr.CosineAnnealingLR(o, 9, 0.005),
    "cosine_one": lambda o: lr.CosineAnnealingLR(o, 1),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 11),
    "restarts_longer": lambda o: lr.CosineAnnealingWarmRestarts(o, 4, 2, 0.001),
    "one_cycle": lambda o: lr.OneCycleLR(o, 0.5, 60),
    "one_cycle_adam": lambda o: lr.OneCycleLR(
        o, [0.5, 0.2], epochs=7, steps_per_epoch=10, pct_start=0.4,
        anneal_strategy="linear", base_momentum=[0.8, 0.7], max_momentum=0.9,
        div_factor=10, final_div_factor=100, three_phase=True),
    "one_cycle_plain": lambda o: lr.OneCycleLR(o, 0.5, 61,
                                               cycle_momentum=False),
    "cyclic": lambda o: cyclic(o, step_size_up=5),
    "cyclic_half": lambda o: cyclic(
        o, base_lr=[0.01, 0.02], max_lr=[0.1, 0.3], step_size_up=7,
        step_size_down=4, mode="triangular2", base_momentum=0.6,
        max_momentum=[0.9, 0.95]),
    "cyclic_range": lambda o: cyclic(o, step_size_up=6, mode="exp_range",
                                     gamma=0.98, cycle_momentum=False),
    "cyclic_function": lambda o: cyclic(o, step_size_up=6,
                                        scale_fn=lambda x: 1 / (5 * x + 1),
                                        scale_mode="iterations"),
    "lambda": lambda o: lr.LambdaLR(o, falling),
    "lambda_each": lambda o: lr.LambdaLR(o, [falling, power]),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, nearly),
    "multiplicative_each": lambda o: lr.MultiplicativeLR(o, [nearly, power]),
    "swa": lambda o: SWALR(o, 0.05),
    "swa_each": lambda o: SWALR(o, [0.05, 0.5], 33, "linear"),
    "swa_at_once": lambda o: SWALR(o, 0.3, 0),
    "warmup_cosine": lambda o: sequence(o, [warmup, cosine], [5]),
    "sequence_of_three": lambda o: sequence(
        o, [lambda o: lr.ConstantLR(o, 0.5, 9),
            lambda o: lr.ExponentialLR(o, 0.9),
            lambda o: lr.MultiStepLR(o, [0, 4, 20])], [10, 30]),
    "sequence_of_closed": lambda o: sequence(
        o, [warmup, lambda o: lr.StepLR(o, 3),
            lambda o: lr.PolynomialLR(o, 12), lr.LinearLR, lr.ConstantLR],
        [5, 20, 35, 45]),
    "sequence_of_open": lambda o: sequence(
        o, [warmup, lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
            lambda o: lr.LambdaLR(o, falling),
            lambda o: lr.MultiplicativeLR(o, nearly),
            lambda o: SWALR(o, 0.05, 4)], [5, 20, 30, 45]),
    "sequence_of_cycles": lambda o: sequence(
        o, [lambda o: cyclic(o, step_size_up=5),
            lambda o: lr.OneCycleLR(o, 0.5, 50)], [20]),
    "sequence_of_cycles_last": lambda o: sequence(
        o, [warmup, lambda o: cyclic(o, step_size_up=5)], [20]),
    "sequence_skips_first": lambda o: sequence(o, [warmup, cosine], [0]),
    "sequence_of_chain": lambda o: sequence(
        o, [lambda o: chain(o, [warmup, lambda o: lr.ExponentialLR(o, 0.95)]),
            cosine], [12]),
    "sequence_of_sequence": lambda o: sequence(
        o, [lambda o: sequence(
            o, [warmup, lambda o: lr.ExponentialLR(o, 0.95)], [6]),
            cosine], [20]),
    "chain": lambda o: chain(o, [lambda o: lr.ConstantLR(o, 0.1, 20),
                                 lambda o: lr.ExponentialLR(o, 0.9)]),
    "chain_of_sequence": lambda o: chain(
        o, [lambda o: sequence(o, [warmup, cosine], [5]),
            lambda o: lr.StepLR(o, 11, 0.5)]),
    "plateau": lr.ReduceLROnPlateau,
    "plateau_max": lambda o: lr.ReduceLROnPlateau(
        o, "max", 0.5, 2, 0.01, "abs", 3, [1e-3, 1e-2]),
    "plateau_rel": lambda o: lr.ReduceLROnPlateau(o, "max", patience=1,
                                                  eps=1e-3),
    "plateau_abs": lambda o: lr.ReduceLROnPlateau(
        o, patience=4, threshold_mode="abs", min_lr=1e-4),
    "plateau_added": lambda o: lr.ReduceLROnPlateau(o, patience=3),
}
ADAM = {"step_gamma", "one_cycle_adam", "one_cycle_plain", "cyclic_half"}
ADDED = {"step_added": 10, "linear_added": 10, "exponential_added": 10,
         "plateau_added": 10}


class Trained:
    def __init__(self, name):
        self.model = torch.nn.Linear(2, 1)
        groups = [{"params": [self.model.weight], "lr": 0.1},
                  {"params": [self.model.bias], "lr": 0.02}]
        self.optimizer = (torch.optim.Adam(groups) if name in ADAM
                          else torch.optim.SGD(groups, momentum=0.9))

    def add_group(self):
        self.optimizer.add_param_group(
            {"params": [torch.zeros(3, requires_grad=True)], "lr": 0.4})

    def now(self, scheduler):
        groups = self.optimizer.param_groups
        return {"lr": [group["lr"] for group in groups],
                "momentum": [group["betas"][0] if "betas" in group
                             else group["momentum"] for group in groups],
                "last_lr": list(scheduler.get_last_lr())
                if hasattr(scheduler, "_last_lr") else []}


def step(scheduler, number):
    if isinstance(scheduler, lr.ReduceLROnPlateau):
        scheduler.step(metric(number))
    else:
        scheduler.step()


def as_json(value):
    if isinstance(value, collections.Counter):
        return {str(key): count for key, count in value.items()}
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4),
                               torch.nn.Linear(4, 2)).double()


def fill(model, step):
    # The same values in scheduler_parity_test.cpp.
    with torch.no_grad():
        for i, tensor in enumerate(model.state_dict().values()):
            values = torch.arange(tensor.numel(), dtype=torch.float64)
            values = torch.sin(values * 3 + 5 * i + step) + 1.5
            tensor.copy_((values * 10 if i == 6 else values).view(tensor.shape))
    return model


def batches():
    return [torch.sin(torch.arange(15, dtype=torch.float64) * (k + 1) + k)
            .view(5, 3) for k in range(4)]


AVERAGES = {
    "equal": {},
    "equal_buffers": {"use_buffers": True},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "ema_buffers": {"avg_fn": swa_utils.get_ema_avg_fn(), "use_buffers": True},
}
averages = {}
for name, options in AVERAGES.items():
    model = fill(net(), 0)
    average = swa_utils.AveragedModel(model, **options)
    for number in range(1, 7):
        average.update_parameters(fill(model, number))
    averages[name] = {key: value.clone()
                      for key, value in average.state_dict().items()}
    average.eval()
    swa_utils.update_bn([(batch, 0) for batch in batches()], average)
    averages[name + "_bn"] = average.state_dict()
    averages[name + "_out"] = {"out": average(batches()[0]).detach()}
torch.save({f"{name}/{key}": value for name, state in averages.items()
            for key, value in state.items()}, f"{FOLDER}/swa.pt")

rates, states, continued = {}, {}, {}
for name, make in CASES.items():
    trained = Trained(name)
    scheduler = make(trained.optimizer)
    trace = [trained.now(scheduler)]
    for number in range(STEPS):
        if number == ADDED.get(name):
            trained.add_group()
        step(scheduler, number)
        trace.append(trained.now(scheduler))
        if number + 1 == MIDDLE:
            states[name] = as_json(scheduler.state_dict())
            torch.save({"MODEL_STATE": trained.model.state_dict(),
                        "OPTIMIZER_STATE": trained.optimizer.state_dict(),
                        "SCHEDULER_STATE": scheduler.state_dict()},
                       f"{FOLDER}/python-{name}.pt")
    rates[name] = trace

    trained = Trained(name)
    scheduler = make(trained.optimizer)
    if name in ADDED:
        trained.add_group()
    snapshot = torch.load(f"{FOLDER}/cpp-{name}.pt", weights_only=True)
    trained.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
    scheduler.load_state_dict(snapshot["SCHEDULER_STATE"])
    trace = [trained.now(scheduler)]
    for number in range(MIDDLE, STEPS):
        step(scheduler, number)
        trace.append(trained.now(scheduler))
    continued[name] = trace

for name, content in {"rates": rates, "states": states,
                      "continued": continued}.items():
    with open(f"{FOLDER}/{name}.json", "w") as file:
        json.dump(content, file)
