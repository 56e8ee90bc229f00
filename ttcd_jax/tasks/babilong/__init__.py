"""BABILong (Kuratov et al. 2024), tasks qa1 to qa5: questions about facts that are hidden in a long
text.

`stories` reads the facts and questions of bAbI (Weston et al. 2015), `world` writes stories of our
own, `samples` hides the facts among sentences of a text, `prompts` makes prompts of the
result and judges answers.
"""
