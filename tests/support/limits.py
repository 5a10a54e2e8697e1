"""Whether limits keep what min-p, top-k and top-p say, against a sort in float64."""

import torch

from tritonllm.kernels.sampling.common import clean_ref, keep_ref


def check_limits(limits, logits, temperature, top_k, top_p, min_p):
    """The limits keep a beginning of the order by logit and id, as long as a float64 computation says."""
    x = clean_ref(logits)
    kept = (keep_ref(x, limits[0], limits[1]) & (x > -torch.inf)).cpu()
    x = x.double().cpu()
    for row in range(len(x)):
        order = torch.sort(x[row], descending=True, stable=True).indices
        n = int(kept[row].sum())
        assert n >= 1 and kept[row][order[:n]].all(), "not the first tokens of the order"
        values = x[row][order]
        values = values[values > -torch.inf]
        k = int(top_k[row])
        probs = torch.softmax(values / float(temperature[row]), 0)
        shortest, longest = [], []
        for counts, error in ((shortest, -1e-5), (longest, 1e-5)):  # rounding may move an edge by one token
            m = len(values)
            if min_p[row] > 0:
                m = int((probs >= float(min_p[row]) * (1 - error) * probs[0]).sum())
            m = min(m, k) if k > 0 else m
            if top_p[row] < 1:
                cumulated = probs[:m].cumsum(0) / probs[:m].sum()
                m = min(m, int((cumulated < float(top_p[row]) * (1 + error)).sum()) + 1)
            counts.append(max(m, 1))
        assert shortest[0] <= n <= longest[0], f"kept {n} tokens, not {shortest[0]} to {longest[0]}"
        weights = torch.exp((values[:n] - values[0]) / float(temperature[row]))
        torch.testing.assert_close(limits[2][row].cpu().double(), weights.sum(), rtol=1e-5, atol=0)
