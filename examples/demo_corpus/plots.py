"""What a plot is. A story is an opening, one plot and a closing line (see stories.py).

Slots of every plot: hero, he, him, his, himself, kind (girl, rabbit...), the same for the friend with an f in front
(friend, fhe, fhim, fhis, fkind), elder ("miller"), kin ("mother"), spot1, spot2, spot3, place, day. Hero and friend
never share a pronoun, so that "he" and "she" always have one meaning; nobody else gets one.
"""

from typing import NamedTuple


class Plot(NamedTuple):
    titles: str  # templates
    # further slots; a key with several names has options with as many parts
    draws: dict[str, list]
    text: str  # template
