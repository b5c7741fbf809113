"""The numbers that the paper printed: accuracy in percent, mean and standard deviation over the clients of one run.

Copied from the TeX source by table. The last row of the aggregation table is printed r = 1 % and is r = 0.1 %.
The figures' numbers are not available; their points that also stand in the main table are taken from there.
"""

from collections.abc import Iterator
from itertools import product

__all__ = ["PUBLISHED", "Number", "published"]

Number = tuple[float, float]
"""mean and standard deviation"""
Key = tuple[str, str, str, float, float]
"""table, method or switch, data set, ratio in percent, alpha"""

# Columns of both: MNIST r = 0.5, 0.1; Fashion-MNIST r = 0.5, 0.1; CIFAR-10 r = 5, 1. A dash is a run that did not
# converge. DFL-UB, which does not depend on r, is printed once for both.
_COLUMNS = [
    ("mnist", 0.5),
    ("mnist", 0.1),
    ("fashion-mnist", 0.5),
    ("fashion-mnist", 0.1),
    ("cifar10", 5),
    ("cifar10", 1),
]

_MAIN = """
dfl-ub    100  95.76±0.10   95.76±0.10   86.12±0.14  86.12±0.14  86.11±0.08  86.11±0.08
dfl-ub    0.1  94.27±0.76   94.27±0.76   73.64±3.58  73.64±3.58  58.75±4.12  58.75±4.12
dfl-lb    100  89.24±0.06   68.98±0.02   65.16±1.55  48.53±1.76  55.96±0.11  41.30±0.03
dfl-lb    0.1  82.36±1.18   66.49±0.05   49.08±5.46  -           16.96±0.27  -
mixmatch  100  86.89±0.69   61.13±18.27  65.97±1.65  35.82±1.75  65.54±0.23  48.16±0.16
mixmatch  0.1  63.69±14.62  39.40±10.90  54.52±3.14  42.46±4.28  44.49±1.15  30.53±1.37
flexmatch 100  91.85±0.23   71.84±1.03   69.33±1.12  52.40±0.26  56.90±0.18  37.91±0.20
flexmatch 0.1  81.38±2.58   55.96±2.31   57.63±2.37  40.03±4.05  46.09±0.50  -
cbafed    100  69.93±1.61   40.67±0.44   55.54±1.16  27.99±0.22  42.29±0.91  26.18±0.23
cbafed    0.1  70.65±4.64   37.79±2.48   47.39±4.40  -           31.93±1.13  21.50±0.89
semidfl   100  94.46±0.06   90.88±0.07   75.36±0.27  60.27±0.16  69.40±0.20  49.79±0.18
semidfl   0.1  88.69±0.09   70.66±0.50   71.49±0.14  49.40±0.71  49.63±0.61  40.28±0.89
"""

_TOPOLOGY = """
dfl-ub    100  95.76±0.10   95.76±0.10   83.68±0.71   83.68±0.71  79.77±0.14  79.77±0.14
dfl-ub    0.1  94.27±0.76   94.27±0.76   59.49±4.91   59.49±4.91  44.60±2.19  44.60±2.19
dfl-lb    100  92.29±0.18   69.98±0.01   73.00±0.57   64.80±0.23  53.65±0.17  39.98±0.13
dfl-lb    0.1  84.96±0.90   67.51±0.02   58.37±5.73   52.12±2.14  34.15±2.03  31.51±1.83
mixmatch  100  88.73±1.25   32.19±10.53  66.47±6.53   35.84±9.88  63.87±0.45  46.40±0.63
mixmatch  0.1  72.25±5.12   28.76±9.22   36.48±7.43   25.31±7.51  38.21±5.28  26.23±2.39
flexmatch 100  94.67±0.05   64.04±0.90   71.63±1.94   47.38±7.20  55.11±0.34  38.17±0.56
flexmatch 0.1  83.92±3.08   53.88±3.97   37.57±10.07  27.37±8.60  39.49±2.93  28.50±0.70
cbafed    100  71.60±3.14   38.87±0.13   69.37±1.12   41.06±3.19  44.29±3.42  26.05±1.44
cbafed    0.1  61.06±3.72   30.77±1.64   44.47±4.09   33.35±3.24  33.04±3.20  24.87±2.09
semidfl   100  95.06±0.05   79.32±0.06   77.40±0.92   68.20±1.48  70.30±0.45  52.54±0.51
semidfl   0.1  88.93±0.16   70.84±0.51   68.21±1.37   63.39±1.73  53.99±2.11  39.96±1.67
"""

# Rows of the ablations: alpha, r.
_PSEUDO_LABELS = """
100 5  40.51±13.74  47.40±9.83  69.40±0.20
100 1  32.13±0.67   34.88±0.89  49.79±0.18
0.1 5  24.51±3.98   31.14±5.36  49.63±0.61
0.1 1  14.95±2.22   30.89±1.03  40.28±0.89
"""

_MIXUP = """
100 0.5  93.69±0.09  92.17±0.20  94.46±0.06
100 0.1  76.30±0.54  90.29±0.10  90.88±0.07
0.1 0.5  70.75±9.39  86.80±0.47  88.69±0.09
0.1 0.1  49.13±4.93  69.32±0.89  70.66±0.50
"""

_AGGREGATION = """
100 0.5  75.18±0.22  75.80±0.12  75.36±0.27
100 0.1  56.12±0.11  59.03±0.13  60.27±0.16
0.1 0.5  70.06±0.34  70.46±0.78  71.49±0.14
0.1 0.1  49.11±0.56  51.38±0.64  49.40±0.71
"""


def _methods(table: str, text: str) -> Iterator[tuple[Key, Number | None]]:
    for line in text.strip().splitlines():
        method, alpha, *cells = line.split()
        for (dataset, ratio), cell in zip(_COLUMNS, cells, strict=True):
            yield (table, method, dataset, float(ratio), float(alpha)), _number(cell)


def _switches(table: str, dataset: str, switches: str, text: str) -> Iterator[tuple[Key, Number | None]]:
    for line in text.strip().splitlines():
        alpha, ratio, *cells = line.split()
        for switch, cell in zip(switches.split(), cells, strict=True):
            yield (table, switch, dataset, float(ratio), float(alpha)), _number(cell)


def _number(cell: str) -> Number | None:
    if cell == "-":
        return None
    mean, std = cell.split("±")
    return float(mean), float(std)


PUBLISHED: dict[Key, Number | None] = {
    **dict(_methods("table-main", _MAIN)),
    **dict(_methods("table-topology", _TOPOLOGY)),
    **dict(_switches("table-pseudo-labels", "cifar10", "vanilla apl npl", _PSEUDO_LABELS)),
    **dict(_switches("table-mixup", "mnist", "none gan diffusion", _MIXUP)),
    **dict(_switches("table-aggregation", "fashion-mnist", "constant adatest adagen", _AGGREGATION)),
}
"""None is the paper's dash: a run that did not converge"""

# The figures' points that the main table prints too.
PUBLISHED |= {
    (figure, *key[1:]): number
    for figure, (key, number) in product(("figure-alpha", "figure-ratio"), list(PUBLISHED.items()))
    if key[0] == "table-main"
}


def published(table: str, row: str, dataset: str, ratio: float, alpha: float) -> tuple[Number | None, ...]:
    """One number or dash (None) in a tuple; an empty tuple where the paper has nothing."""
    key = (table, row, dataset, ratio, alpha)
    return (PUBLISHED[key],) if key in PUBLISHED else ()
