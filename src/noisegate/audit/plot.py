"""The ROC curve of the attack against the region that the claim allows, in one file that loads nothing."""

import numpy as np

from noisegate.audit.record import WEAKER, Audit

POINTS = 201


def page(found: Audit) -> str:
    """HTML."""
    from plotly import graph_objects, io  # here, since only a plot needs it

    claim = found.claim
    figure = graph_objects.Figure()
    false = np.linspace(0, 1, POINTS)
    most = claim.most_hits(false)
    figure.add_scatter(
        x=false.tolist(), y=most.tolist(), name="claimed: nothing lies above", mode="lines", line={"dash": "dash"}
    )
    figure.add_scatter(x=[0, 1], y=[0, 1], name="a coin", mode="lines", line={"color": "lightgray"}, fill="tonexty")
    measured = [("measured", found.whole), (f"noise times {WEAKER}", found.power)]
    for name, whole in measured:
        if whole.curve:
            x, y = zip(*whole.curve, strict=True)
            figure.add_scatter(x=x, y=y, name=f"{name}, {whole.trials} trials", mode="lines")
    figure.update_layout(
        title=f"{found.verdict}: epsilon {claim.epsilon:.3f} at delta {claim.delta:.3g} on {found.dataset}",
        template="plotly_white",
        xaxis={"title": "share of workers without the canary that are accused", "range": [0, 1]},
        yaxis={"title": "share of workers with it that are found", "range": [0, 1]},
    )
    text: str = io.to_html(figure, include_plotlyjs=True, div_id="audit", config={"displaylogo": False})
    return text
