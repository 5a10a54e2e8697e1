"""Plots in which something is lost, found, dared or wished for (the slots are those of plots.py)."""

from .plots import Plot

LOST = Plot(
    "The lost {thing}|Where is the {thing}?|{Hero} and the {thing}",
    {
        "thing keeps": [
            ("silver whistle", "{He} wore it on a string and blew it every evening"),
            ("blue scarf", "{His} grandmother had made it, and it was as soft as a cloud"),
            ("little drum", "{He} played it whenever {he} was happy"),
            ("wooden boat", "{He} had carved it {himself}, and it sailed very well"),
            ("brass key", "It opened a small box in which {he} kept {his} best things"),
            ("red kite", "It could fly higher than any bird"),
            ("lucky stone", "It was round and white, and {he} held it when {he} could not sleep"),
            ("story book", "{He} knew every page of it by heart"),
        ],
        "nook": ["under a heap of dry leaves", "behind a big stone", "in the tall grass", "between two old roots"],
        "thief": ["the wind", "a magpie", "a playful puppy", "a young crow"],
    },
    """
    {Hero} had a {thing}. {keeps}. [But one {day}|Then, one {day}], the {thing} was gone. [{He} looked under the bed
    and behind the door|{He} turned {his} whole room upside down], but [it was not there|{he} could not find it
    anywhere].

    "[Do not cry|Do not worry|Cheer up]," said {his} {kin}. "[Lost things want to be found|Look where you last had
    it|Ask your friends to help]." So {hero} [went|ran] to {friend}. "My {thing} is [gone|lost]!" said {hero}. "[Then
    we will look for it together|Two see more than one|Let us find it before dark]," said {friend}.

    First they [went to|looked at] {spot1}. [There was nothing there but a sleepy cat|They found a button and a blue
    feather, but no {thing}|They looked high and low, but the {thing} was not there]. Then they [tried|went on to]
    {spot2}. There they met the {elder}. "[I have not seen a {thing}|No {thing} here]," said the {elder}, "but {thief}
    went by this morning, on the way to {spot3}."

    [They ran as fast as they could|So off they went|{Hero} took {friend} by the hand and ran]. And there, {nook} near
    {spot3}, lay the {thing}! [{Friend} saw it first|{Hero} saw it first|They both saw it at the same time]. "[So it
    was {thief} all along|{Thief} must have dropped it here]," [laughed|said] {friend}. {Hero} [hugged {fhim}|thanked
    {fhim} again and again]. [From that day on, {he} took better care of {his} {thing}|After that, {hero} and {friend}
    shared the {thing}, one day each|{He} never lost the {thing} again].
    """,
)

BABY = Plot(
    "The lost {baby}|{Hero} and the {baby}|A long way home",
    {
        "baby parent sound nest": [
            ("duckling", "mother duck", "Peep, peep", "among the reeds"),
            ("lamb", "old sheep", "Baa, baa", "on the far side of the field"),
            ("kitten", "grey cat", "Mew, mew", "in the warm straw of the barn"),
            ("owlet", "mother owl", "Hoo, hoo", "at the top of a hollow tree"),
            ("piglet", "big pink pig", "Oink, oink", "behind the farm gate"),
            ("chick", "brown hen", "Cheep, cheep", "in the little hen house"),
        ],
        "treat": ["a crumb of bread", "some clover", "a drop of water", "half of the lunch"],
    },
    """
    One {day}, {hero} was [walking|playing] near {spot1} when {he} heard a [small|thin] voice. "{Sound}!" it
    [cried|went]. {He} [looked around|bent down], and there [in the grass|beside the path] sat a tiny {baby}, all
    alone. "[You are lost, are you not?|Where is your mother?]" {he} asked. The {baby} [looked up with round eyes|came
    a little closer].

    {Hero} gave it {treat}. Then {he} [picked it up|put it in a basket] and went to find {friend}. "We must [take it
    home|find its family] before [night|dark]," {he} said. "[But where does it live?|How will we find the way?]" asked
    {friend}. [They thought for a while|Nobody knew]. Then {friend} had an idea. "The {elder} knows every [animal|path]
    from here to {spot3}. [Let us ask|Come on]!"

    The {elder} [looked at the {baby} and nodded|listened to the whole story]. "I know that {baby}," said the {elder}.
    "It lives {nest}. [Go past {spot2} and keep to the left|Walk past {spot2} and listen well]." So they walked past
    {spot2}. The way was long, and the {baby} [fell asleep|grew tired], but {hero} [held it close|did not give up].

    At last they heard a [loud|worried] "{sound}!" It was the {parent}, {nest}. The {baby} [jumped down and ran as fast
    as its legs could go|woke up and called back]. [How happy they were|What a welcome that was]! {Hero} and {friend}
    [watched and smiled|waved goodbye]. [Every spring after that, the {baby} came to visit them.|"It is good to be
    home," said {friend}, "and it is good to bring someone home."|On the way back {hero} was tired, but {he} felt as
    light as a feather.]
    """,
)

BRIDGE = Plot(
    "The broken bridge|After the storm|{Hero} and the great storm",
    {
        "broken use": [
            ("the bridge", "Nobody could cross the water"),
            ("the roof of the big barn", "The rain was falling on the hay"),
            ("the path to the well", "Nobody could fetch water"),
            ("the little dam", "The water was running into the gardens"),
        ],
        "plan": ["a long line, hand to hand", "teams of two", "a big circle around the work"],
        "song": ["an old working song", "the song of the four winds", "a funny song about a goat"],
    },
    """
    One night a [great|wild|terrible] storm came to {place}. The wind [howled|roared], the rain [beat on every
    roof|fell like a river], and nobody slept. In the morning {hero} [looked out|went outside] and saw that the storm
    had broken {broken}. {Use}.

    Everyone [stood and looked|came together at {spot1}]. "It [is too much work|will take a year]," said one. "[It
    cannot be done|We are too few]," said another. {Hero} [was the smallest of them all|did not like to speak in front
    of others], but {he} [climbed on a stone|took a deep breath] and said, "If each of us [carries one stone|brings one
    board], we can mend it [together|before night]."

    For a moment it was quiet. Then {friend} [put up {fhis} hand|stepped forward]. "I will [carry the first one|help],"
    said {friend}. "[So will I|Count on me]," said the {elder}. [Soon everybody wanted to help|One after the other,
    they all said yes]. They made {plan}. They brought stones from {spot2} and wood from {spot3}, and they sang {song}.
    {Hero} ran up and down with [water|bread] for the workers.

    When the [sun went down|first star came out], the work was done. {Broken} was [better than before|as good as new].
    The {elder} [thanked|turned to] {hero}. "You are small," said the {elder}, "but [your idea was big|you had the
    biggest idea of all]." {Hero} [turned red|laughed]. "[I had the idea|An idea is only a beginning]," {he} said, "but
    [all of us did the work|it was done by many hands]." [And they lit a fire and danced until late|And that evening
    there was a feast for everyone].
    """,
)

JOURNEY = Plot(
    "{Hero} sees {sight}|The long walk|On the way to {sight}",
    {
        "sight seen": [
            ("the sea", "It was blue and wide, and it had no end"),
            (
                "the great waterfall",
                "It fell from the sky with a voice like thunder, and a rainbow stood in front of it",
            ),
            ("the top of the mountain", "From there the whole world looked like a quilt of green and gold"),
            ("the singing stones", "When the wind blew, the stones sang, each with its own voice"),
            ("the field of a thousand flowers", "There was red and blue and yellow as far as the eye could see"),
            ("the old lighthouse", "Its lamp turned slowly, and the light walked over the water"),
        ],
        "block way": [
            ("a wide stream", "{Friend} rolled three stones into the water, and they stepped across"),
            ("a dark tunnel", "They held hands and sang, and the dark was not so dark any more"),
            ("a thick thorn hedge", "{Hero} found a gap that a hare had made, and they crawled through"),
            ("a steep hill", "They counted their steps, and at two hundred they were at the top"),
            ("a goat that would not move", "{Hero} gave it an apple, and it let them pass"),
        ],
        "bag": ["bread and two apples", "a bottle of water and some nuts", "a warm blanket and a cheese"],
    },
    """
    {Hero} had never seen {sight}. [The {elder} had told {him} of faraway places|{He} had heard a song of faraway
    places], and since then {he} [could think of nothing else|dreamed of it every night]. "[How far is it?|Is it very
    far?]" {he} asked the {elder}. "[A day on foot|As far as you can walk from sunrise to sunset]," said the {elder},
    "[but it is worth every step|if you do not go alone]."

    So one {day}, {hero} and {friend} packed {bag} and set out. They passed {spot1} and {spot2}, and [soon they were
    farther from home than ever before|the houses and trees they knew grew small behind them]. At noon they came to
    {block}. "[Must we turn back?|What now?]" said {hero}. "[Wait|Not yet]," said {friend}. "[There is always a way|Let
    us think]." {Way}.

    [Their feet hurt|The road went on and on], and {hero} [grew tired|began to limp]. "[Just to the next tree|Only a
    little farther]," {friend} said each time. They [told each other stories|shared what was in the bag], and so the
    time went by. And then, when the sun was low, they came over the last rise, and there, at last: {sight}! {Seen}.

    For a long time they [said nothing|only looked]. "[It is even better than in my dream|I did not know that the world
    was so big]," {hero} [whispered|said at last]. They [stayed until the stars came out|took one small stone each, so
    that they would not forget]. [And when they were home again, they told the story to everyone who would listen|Since
    then, {hero} has had a new dream: to find out what comes after].
    """,
)

NOISE = Plot(
    "The noise in the night|What was that?|{Hero} and the strange noise",
    {
        "noise cause mended": [
            (
                "Tap, tap, tap",
                "a branch that knocked on the door each time the wind blew",
                "They tied it up with a string",
            ),
            ("Woooo", "an empty bottle on the wall, with the wind blowing over it", "They filled it with sand"),
            ("Scratch, scratch", "a hungry little kitten", "They gave it a bowl of milk"),
            ("Drip, drop, drip", "a hole in the rain barrel", "They stopped it with a cork"),
            ("Rattle, clack", "a loose shutter with one rusty nail", "They put in a new nail"),
            ("Hrrr, hrrr", "an old dog, asleep under the bench and snoring like a saw", "They let it sleep"),
        ],
        "guess": ["a giant", "a ghost", "a dragon", "a hungry wolf"],
        "tool": ["candle", "lamp", "lantern"],
    },
    """
    It was [midnight|late at night], and everyone in {place} was asleep. Only {hero} was awake. "{Noise}," it went
    outside. {Hero} pulled the blanket over {his} head. "{Noise}," it went again. "[What can it be?|That must be
    {guess}!]" {he} thought.

    In the morning {he} told {friend}. "Maybe it is {guess}," said {hero}. "{Guess}?" said {friend}, and {fhis} eyes
    grew big. "[I have always wanted to see one|Then we must find out]. Tonight we will [watch together|go and look]."
    [{Hero} was not so sure, but {he} said yes|{Hero} was afraid, but with {friend} beside {him} it was not so bad].

    That night they sat by the door with a {tool}. They waited and waited. Then it came: "{Noise}." {Hero} took
    {friend} by the hand. [Step by step|On the tips of their toes], they went out into the dark, past {spot1}, closer
    and closer. {He} held up the {tool}, and what did they see? It was {cause}!

    {Hero} and {friend} looked at each other and [laughed until they had to sit down|began to laugh]. "So that is
    {guess}!" said {friend}. {Mended}, and then they went to bed. [{Hero} slept like a stone|That night nobody pulled
    the blanket over anything]. "[Most things are smaller when you look at them|Fear is big in the dark and small in
    the light]," said {his} {kin} at breakfast.
    """,
)

RACE = Plot(
    "The great race|{Hero} runs a race|Who won the race?",
    {
        "prize": ["golden ribbon", "basket of cherries", "silver cup", "big honey cake"],
        "rival brag": [
            ("the hare", "I will be home before you have tied your shoes"),
            ("the proud goat", "Nobody has ever been faster than I am"),
            ("the young horse", "I could win this race asleep"),
        ],
        "trouble": ["fallen into a ditch", "caught a foot under a root", "run into the deep mud"],
    },
    """
    Every year there was a race in {place}, from {spot1} to {spot2} and back again. The prize was a {prize}. This year
    {hero} wanted to run, too. "You?" said {rival}. "{Brag}." Everyone laughed, but {friend} [did not.|said, "Do not
    listen. Just run."]

    On the day of the race the {elder} [rang a bell|waved a flag], and off they went. {Rival} was [far ahead|out of
    sight] in no time. {Hero} ran [as well as {he} could|at {his} own pace], step by step, and {he} did not stop. [The
    sun was hot|The way was stony], but {he} kept on.

    Near {spot2}, {he} heard someone call for help. It was {rival}, who had {trouble}. The others ran by. [{Hero}
    looked at the road, and {he} looked at {rival}|{Hero} thought of the {prize}, but only for a moment]. Then {he}
    stopped and [held out {his} hand|pulled with all {his} might]. "[What about the race?|Why do you help me?]" asked
    {rival}. "[There is a race every year|Nobody should sit here alone]," said {hero}.

    They came home last of all, side by side. But at the end of the road [everyone was cheering|stood {friend} and the
    whole of {place}]. "The first one home gets a handshake," said the {elder}. "But the {prize} goes to the one with
    the biggest heart." And the {elder} gave it to {hero}. {Rival} cheered [the loudest|louder than anyone]. [{Hero}
    shared the prize with {friend}, of course|From that day {rival} never laughed at anyone again].
    """,
)

WISH = Plot(
    "The three wishes|{Hero} and the {giver}|One wish",
    {
        "giver trap": [
            ("golden fish", "in a net"),
            ("silver bird", "in a thorn bush"),
            ("tiny old man", "under a fallen branch"),
            ("glowing beetle", "in a spider's web"),
        ],
        "silly trouble": [
            ("a mountain of cake", "the cake blocked the door, and nobody could get in or out"),
            ("a house full of gold", "there was no room left for a chair or a bed"),
            ("a voice as loud as thunder", "every window broke when {he} said good morning"),
            ("wings", "{he} flew into the washing and got stuck"),
            ("rain of lemonade", "everything was sticky, and the bees came from far away"),
        ],
    },
    """
    One {day}, near {spot1}, {hero} found a {giver}. It was caught {trap}. "[Set me free|Please help me]," it said,
    "and you shall have a wish." {Hero} [was so surprised that {he} sat down|had never met a {giver} that could speak],
    but {he} set it free at once. "[Think well|Do not hurry]," said the {giver}. "You may change your mind only once."

    But {hero} did not think at all. "I wish for {silly}!" {he} cried. And [in the blink of an eye|before {he} could
    close {his} mouth], {he} had it: {silly}! At first it was [wonderful|great fun]. Then {trouble}. "[Oh dear|Oh no],"
    said {friend}, who had come running. "[What have you done?|Is that what you wanted?]"

    {Hero} [ran back|hurried back] to {spot1} and called the {giver}. "[I have changed my mind|I was wrong]," {he}
    said. The {giver} [laughed|smiled]. "I thought so. What do you really want?" This time {hero} thought for a long
    while. {He} looked at {friend}, and at {place} in the evening sun. "[I think that I have it already|I would like
    everything to be as it was]," {he} said.

    "[That is the best wish of all|A good choice]," said the {giver}, and it was gone. When {hero} came home,
    [everything was as before|the soup was on the table]. {Friend} stayed for supper. [They ate bread and cheese, and
    it tasted better than all the cake in the world.|"What did you wish for?" asked {his} {kin}. "This," said {hero}.
    "Just this."]
    """,
)

TREASURE = Plot(
    "The treasure map|{Hero} and the old map|The box under the tree",
    {
        "found": ["in an old boot", "behind a loose brick", "between the pages of a cook book", "in a green bottle"],
        "inside meaning": [
            ("a little mirror", "It shows the one who can find anything"),
            ("a bag of seeds", "Plant them, and the treasure will come back every year"),
            ("a loaf of bread and a letter", "Eat this together. Then fill the box again for the next ones"),
            ("two wooden flutes", "One is for you, and one is for the friend who came along"),
        ],
        "steps": ["ten", "twenty", "thirty", "forty"],
    },
    """
    One {day}, {hero} found a map {found}. There was a [red|black] cross on it, and below it someone had written: "From
    {spot1} go to {spot2}. Then take {steps} steps to the north and dig." {Hero}'s heart [beat fast|jumped]. {He} ran
    to {friend}. "A treasure!" {he} [cried|whispered]. "[Will you come with me?|Bring a spade!]"

    They began at {spot1}, as the map said. From there they went to {spot2}. "Which way is north?" asked {friend}.
    "[The {elder} says that moss grows on the north side|In the morning the sun is in the east, so north is over
    there]," said {hero}. They took {steps} steps and counted out loud. [Then they dug|Then they began to dig].

    They dug and dug. [First they found a stone|First they found an old spoon], then a root, and then, clonk, a box! It
    was [made of iron|green with age] and not very big. "Gold," said {hero}. "Or jewels," said {friend}. They opened
    the lid together. Inside there was {inside}. [On the lid|On a piece of paper] they read: "{Meaning}."

    For a moment they were [a little disappointed|quiet]. Then {friend} [began to smile|laughed]. "[It was the best
    morning of the year|I would not have missed it]," {fhe} said, "[even without gold|and we did it together]." {Hero}
    [nodded|thought about it] and put the map back in its place, {found}, [so that others could find it some day|for
    the next one who comes along].
    """,
)

ADVENTURES = [LOST, BABY, BRIDGE, JOURNEY, NOISE, RACE, WISH, TREASURE]
