"""Plots about making, learning, sharing and being kind (the slots are those of plots.py)."""

from .plots import Plot

MISSING = Plot(
    "The missing {part}|{Hero} makes {dish}|Something is missing",
    {
        "dish part giver": [
            ("a plum cake", "sugar", "a jar of golden honey"),
            ("a big pot of soup", "salt", "a pinch of sea salt in a paper bag"),
            ("an apple pie", "butter", "a piece of fresh butter"),
            ("a pan of pancakes", "milk", "a jug of cold milk"),
            ("a loaf of bread", "flour", "a small sack of white flour"),
            ("a nut cake", "nuts", "a basket of brown nuts"),
            ("a berry tart", "berries", "a bowl of ripe berries"),
        ],
        "chore": ["sweep the floor", "carry the water", "stack the wood", "feed the hens", "pull the weeds"],
    },
    """
    One {day}, {hero} [wanted|decided] to make {dish} [for {friend}|for the feast|for {his} {kin}]. {He} [washed {his}
    hands|put on an apron|cleaned the table] and set out everything {he} needed. But when {he} opened the [cupboard|big
    jar], there was no {part} left, not [even a little|the smallest bit].

    "[What shall I do now?|What is {dish} without {part}?]" said {hero}. {He} went to {spot1} to ask {friend}. "I have
    [no {part}|none either]," said {friend}, "but [I think the {elder} has some|the {elder} may help you]. [I will come
    with you|Let us go and ask]."

    The {elder} was [working|resting] near {spot2}. "[{Part}? Of course|I have what you need]," said the {elder}. "But
    first, will you [help me|do something for me]? [My back hurts, and someone must|I am so busy, and someone must]
    {chore}." {Hero} and {friend} [did not mind|got to work at once]. They worked [until noon|for an hour], and they
    sang while they worked. When they were done, the {elder} [smiled and|kept the promise and] gave them {giver}.

    Back at home, {hero} [stirred and tasted|mixed everything with a wooden spoon] while {friend} [kept the fire
    going|set the table]. Soon the whole house smelled [sweet|warm and good|wonderful]. [They took the first piece to
    the {elder}|They asked the {elder} to eat with them], [and everyone had a second helping|and there was enough for
    everyone]. "[Work makes it taste better|It tastes best when it is shared]," said the {elder}.
    """,
)

LEARN = Plot(
    "{Hero} learns to {skill}|Once more|How {hero} learned to {skill}",
    {
        "skill fail ok": [
            ("spin a top", "the top fell over at once", "the top stood up straight and hummed for a whole minute"),
            ("whistle", "only air came out", "a clear, high tune rang out over the roofs"),
            ("skate", "{he} fell on {his} back", "{he} glided over the ice like a leaf on the wind"),
            ("juggle", "the apples rolled in all directions", "three apples flew in a circle above {his} head"),
            ("row a boat", "the boat went round and round", "the boat went straight as an arrow"),
            ("fly a kite", "the kite fell on {his} head", "the kite danced among the clouds"),
            ("play the flute", "it sounded like an angry goose", "the music made even the birds stop and listen"),
            ("walk on stilts", "{he} landed in a bush", "{he} walked all the way around the yard"),
        ],
        "tip": ["Slowly first, then fast", "Breathe, and do not look down", "A little every day is enough"],
    },
    """
    [More than anything|That year], {hero} wanted to learn to {skill}. [{Friend} could do it already|Everyone else
    could do it], and it looked so easy. So one {day}, {he} went to {spot1} and tried. But {fail}. {He} tried again,
    and again {fail}. "[I will never learn it|I give up]," said {hero}, and {he} [sat down on the ground|kicked a
    stone].

    {Friend} [had seen it all|came and sat down beside {him}]. {Fhe} did not laugh. "Do you know how many times I
    [tried|failed]?" {fhe} asked. "[A hundred times|More often than I can count]. {Tip}. That is what the {elder} told
    me." {Hero} [wiped {his} nose|looked up]. "A hundred times?" "[At least|Maybe more]," said {friend}.

    So {hero} [came back|practised] every day. [On Monday|On the first day] {fail}. [On Tuesday|On the second day] it
    went a little better. [When it rained, {he} practised at home|{His} {kin} gave {him} warm milk every evening]. And
    each time {he} wanted to stop, {he} said to {himself}, "{Tip}."

    Then, one morning at {spot1}, it happened. {Hero} [closed {his} eyes|took a deep breath], and {ok}! {Friend}
    [cheered|clapped {fhis} hands]. "[You did it|I knew you could do it]!" {fhe} [cried|shouted]. {Hero} [could hardly
    believe it|laughed out loud]. [The next day, a smaller child asked {him} for help, and {hero} knew just what to
    say: "{tip}"|And do you know what {he} did then? {He} did it again, just to be sure|{He} had learned to {skill},
    and something else as well: not to give up too soon].
    """,
)

SHARE = Plot(
    "One {treat} for two|The quarrel|{Hero}, {friend} and the {treat}",
    {
        "treat share shared": [
            ("big pear", "cut it in two", "they cut it in two"),
            ("honey cake", "make two slices of it", "they made two slices of it"),
            ("red sledge", "take turns", "they took turns, one ride each"),
            ("swing", "take turns", "they took turns, ten swings each"),
            ("round cheese", "cut it in half", "they cut it in half"),
            ("little boat", "use it together", "one held the rope, and the other sailed it"),
        ],
        "weather": ["a cloud came and it began to rain", "the sun went behind a hill", "a cold wind blew"],
    },
    """
    {Hero} and {friend} [were the best of friends|did everything together]. But one {day}, near {spot1}, they found a
    {treat}. "[I saw it first|It is mine]!" said {hero}. "No, [I did|it is mine]!" said {friend}. They [pulled and
    pushed|shouted] until they were both red in the face. Then {weather}, and they went home [without a word|angry],
    each by a different path.

    {Hero} sat at the window. [The house was very quiet|{He} tried to play alone, but it was no fun]. "[What is a
    {treat} without a friend?|Why am I so sad?]" {he} thought. At the same time {friend} sat by {fhis} own window and
    thought [just the same|of {hero}].

    In the morning {hero} [got up early|ran out without breakfast] and went to {spot2}. There {he} met {friend}, who
    was on the way to {him}. "[I am sorry|You can have the {treat}]," said {hero}. "No, [I am sorry|you can have it],"
    said {friend}. Then they both [began to laugh|laughed]. The {elder} [heard them|came by] and asked, "Can you not
    {share}?"

    And that is what they did: {shared}. [It was the best day of the whole summer|It was twice as good as having it
    alone]. [From then on|Ever since], whenever they find something, {hero} says, "Half for you," and {friend}
    [says|answers], "[And half for you|Half for you, too]."
    """,
)

GIFT = Plot(
    "A gift for {friend}|The best present|{Hero}'s present",
    {
        "wish make": [
            ("warm hat", "a ball of red wool"),
            ("bird house", "some old boards"),
            ("necklace", "a string and the prettiest shells"),
            ("paper lantern", "a jar and a candle"),
            ("picture book", "paper, paint and thread"),
            ("toy boat", "a piece of bark and a big leaf"),
        ],
        "coins": ["two", "three", "four"],
        "when": ["birthday", "name day"],
    },
    """
    It was the day before {friend}'s {when}, and {hero} had no present yet. {He} [counted|looked at] {his} coins. There
    were only {coins}. {He} went to {spot1} and looked at everything that was for sale, but [it all cost too
    much|{coins} coins were not enough for anything]. {He} walked home slowly with {his} hands in {his} pockets.

    "[Why so sad?|What is the matter?]" asked the {elder}. {Hero} told the whole story. "[The best presents are not
    bought|Money is not the only thing that you have]," said the {elder}. "You have two good hands. What does {friend}
    [need|like]?" {Hero} thought hard. "{Fhe} has always wanted a {wish}," {he} said. "Then make one," said the
    {elder}.

    So {hero} found {make} and [sat down at the table|got to work]. {He} worked all evening. [The first try went wrong,
    and {he} began again|{He} hurt {his} thumb once, but {he} went on]. [At midnight|When the candle was almost gone],
    the {wish} was ready. [It was not perfect|It was a bit crooked], but [it was made with love|there was no other like
    it].

    The next day {friend} opened the parcel. {Fhe} was quiet for so long that {hero} [became worried|held {his}
    breath]. "You made this?" {fhe} asked. "For me?" Then {fhe} [threw {fhis} arms around {him}|smiled from ear to
    ear]. "[It is the best present I have ever had|I will keep it for ever]." [And {fhe} did|And that was the truth].
    If you visit {friend} today, {fhe} will show you the {wish} [before you sit down|first of all].
    """,
)

SEED = Plot(
    "The little seed|{Hero}'s garden|The seed that slept",
    {
        "plant grown": [
            ("a sunflower", "taller than the door, with a face like the sun"),
            ("a pumpkin", "so big that three friends could sit on it"),
            ("an apple tree", "thin as a stick, with three green leaves"),
            ("a bean", "so high that it looked in at the window"),
            ("a rose", "red as the evening, and the bees loved it"),
            ("a melon", "round and green and as heavy as a cat"),
        ],
        "week": ["two weeks", "three weeks", "a whole month"],
    },
    """
    One {day}, the {elder} gave {hero} a seed. "[Look after it|Be good to it]," said the {elder}, "and it will [thank
    you|surprise you]." {Hero} [dug a hole|made a small bed of earth] near {spot1}, put the seed in and gave it water.
    Then {he} sat down to wait. {He} waited until supper. Nothing happened.

    The next day {he} came back. Nothing. The day after that, nothing. "[It is a bad seed|It is broken]," said {hero}
    after {week}. {He} wanted to dig it up, but {friend} [stopped {him}|held {his} arm]. "It is not broken," said
    {friend}. "It is [busy|getting ready]. [You do not see it, but it is growing down there in the dark|Good things
    need time]."

    So {hero} [waited|gave it water every morning]. {He} [pulled out the weeds|put a little fence around it], and when
    the nights were cold, {he} covered it with straw. {Friend} [told it jokes|sang to it]. [Days went by|The moon grew
    round and thin again]. And then, one morning, there was something green, no bigger than [a fingernail|an ant].

    "It is awake!" cried {hero}, and {he} ran to fetch {friend}. After that it grew [every day|faster and faster]. By
    the end of the summer there stood {plant}, {grown}. "[Was I right?|What did I tell you?]" asked {friend}. {Hero}
    nodded. "[I will never call a seed broken again|Some things are only slow]," {he} said. And in autumn {he} gave new
    seeds to everyone who [asked|could wait].
    """,
)

TRUTH = Plot(
    "The broken {pot}|{Hero} tells the truth|A hard word",
    {
        "pot owner": [
            ("blue jug", "{his} {kin}"),
            ("window", "the {elder}"),
            ("clay pot", "the {elder}"),
            ("painted plate", "{his} {kin}"),
            ("big mirror", "the {elder}"),
            ("glass lamp", "{his} {kin}"),
        ],
        "game": ["threw a ball", "chased a butterfly", "danced with a broom", "swung a long stick"],
    },
    """
    One {day}, {hero} [was playing|was alone]. {He} {game}, although {he} knew that it was not allowed there. Crash!
    The {pot} [lay on the ground in a hundred pieces|was broken]. It belonged to {owner}. {Hero} looked around. Nobody
    had seen it. {He} [hid the pieces under a bush|pushed the pieces behind a box] and ran away to {spot1}.

    But {he} could not play. [There was a stone in {his} stomach|Everything looked grey]. Even {his} food tasted of
    nothing. "What is wrong?" asked {friend}. At first {hero} did not want to say it. Then [it all came out|{he} told
    {fhim} everything]. "[Will you tell?|What would you do?]" {he} asked. "[That is not for me to say|You know it
    already]," said {friend}. "But I will go with you, if you want to [tell it yourself|say it]."

    So they went together. {Hero}'s knees [shook|were weak]. "It was me," {he} said to {owner}. "I broke the {pot}, and
    I hid the pieces. I am sorry." It was very quiet. "[Thank you for telling me|That was hard to say]," said {owner}
    at last. "A {pot} can be [mended|made again]. Trust is harder to mend, and you have kept it whole."

    {Hero} [swept up the pieces|worked for three days to pay for it], and {friend} helped {him}. Then the stone in
    {his} stomach was gone. [That evening {he} ate three plates of soup|That night {he} slept well again]. "[The truth
    is heavy only until you say it|It is easier to carry a broom than a secret]," {he} told {friend}, and [{fhe}
    agreed|they both laughed].
    """,
)

NEWCOMER = Plot(
    "The new neighbour|{Friend} comes to {place}|A door opens",
    {
        "from": ["far away", "the other side of the mountain", "a land with no trees", "a town by the great water"],
        "game": ["hide and seek", "catch", "marbles", "ball"],
        "gift": ["bag of warm rolls", "handful of nuts", "bunch of daisies", "jar of plum jam"],
    },
    """
    One {day}, someone new moved to {place}. It was {friend}, who came from {from}. {Fhe} [spoke in a strange way|wore
    a funny hat] and did not know anybody. When the others played {game} at {spot1}, {friend} [stood behind a tree and
    watched|sat alone on the steps].

    "[Why does {friend} never play?|I think that {friend} is proud]," said one. "{Fhe} [does not like us|thinks that we
    are silly]," said another. {Hero} [was not so sure|remembered how it feels to be alone]. {He} went home, took a
    {gift} and knocked at {friend}'s door.

    The door opened [just a little|slowly]. "Good day," said {hero}. "This is for you. I am {hero}. [Do you like to
    play {game}?|Would you like to come out?]" {Friend} looked at the {gift} and then at {hero}. "I would like to,"
    {fhe} said [softly|very quietly], "but [I do not know the rules|nobody asked me]." "[Then I will show you|I am
    asking you now]," said {hero}.

    They went to {spot1} together. [At first {friend} made mistakes, but nobody minded|It turned out that {friend} was
    very good at {game}]. And when they were all tired, {fhe} [told them about {from}|taught them a new game]. "[Why
    did you never ask?|Why did you hide?]" they asked. "[I was only shy|I was afraid that you would laugh]," said
    {friend}. [Today, {hero} and {friend} are best friends|Since that day there is always one more in the game], and it
    all began with a {gift}.
    """,
)

SNOW = Plot(
    "The first snow|{Hero} and the snow|A winter day",
    {
        "need done": [
            ("had no wood for the fire", "brought a sledge full of dry wood"),
            ("could not open the door because of the snow", "dug a path right up to the door"),
            ("had a bad cold", "cooked a pot of hot soup"),
            ("had nothing left to eat", "brought bread, cheese and apples"),
        ],
        "snowman": ["a carrot for a nose", "an old hat on its head", "two black stones for eyes"],
    },
    """
    In the night it had snowed. When {hero} [opened the window|woke up], the whole of {place} was white and
    [quiet|soft]. {He} put on {his} scarf and ran out to find {friend}. They [threw snowballs|slid down the hill], and
    near {spot1} they built a snowman with {snowman}.

    "It is strange," said {friend} [after a while|all at once]. "There is no smoke above the {elder}'s house." {Hero}
    [looked|turned around]. It was true. [Everywhere else there was smoke, but not there|Smoke rose from every other
    roof]. "[Let us go and see|Something is wrong]," said {hero}. The snow was deep, and it was a long way past
    {spot2}, but they went.

    They knocked. "Who is there?" asked a weak voice. It was the {elder}, who {need}. "[Wait here|We will be back
    soon]," said {hero}. {He} and {friend} ran home and called {his} {kin}, and together they {done}. Soon the
    {elder}'s house was warm, and there was smoke above the roof [again|like everywhere else].

    "You came through all that snow for me," said the {elder}. "[How can I thank you?|What can I give you?]" "[Tell us
    a story|A story would be nice]," said {friend}. So they sat by the fire while [the snow fell outside|the wind sang
    in the chimney], and the {elder} told them about the winters of long ago. [It was the warmest day of the
    year|{Hero} thought that there was no better place in the world].
    """,
)

EVERYDAY = [MISSING, LEARN, SHARE, GIFT, SEED, TRUTH, NEWCOMER, SNOW]
