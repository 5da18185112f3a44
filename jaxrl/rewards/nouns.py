"""Words that may stand behind a number and leave its value alone: counted things, and what describes them.

A list, because the words that change a number ("or less", "halves", "plus one") have no end.
Nouns are written without their plural "s".
"""

from __future__ import annotations

import re

_NOUNS = """
    acre adult alligator angle animal answer ant apartment app apple aquarium arrangement article attendee babie
    baby bag ball balloon banana barrel baseball basket basketball batche bathroom bead beat bedroom bee berrie
    berry bicycle bike bill biscuit bit block boat book bookshelve bottle bowl boxe boy bracelet brick brother
    brownie bu bucket burger burrito buse bush bushe bushel busine button buyer byte cabinet cake calculator call
    calorie camper can candie candle candy car card carpet carriage carrot carton cartwheel case cat chair chapter
    cherrie cherry chicken child children chip chocolate choice circle cla classe classroom cluster coat coconut
    coin color colour column combination computer contact cookie copie copy counter course cow crab cracker crate
    crayon credit cube cucumber cup cupcake customer date deal decoration deer degree desk device diagonal dice
    digit dime dish dishe divisor doctor dog doll donut door dot doughnut drawer dream drink drum duck earring edge
    egg element elephant email employee envelope episode equation eraser eye face factor fan feather feet fence file
    fish fishe flavor flight floor flower football fork foul frame friend frog fruit function game geese gift
    gigabyte girl glasse goal goat grade grape group guest handshake hat head heartbeat hit home horse hour house
    inche index indice integer interval invitation island item jar jellybean jersey jump key kid kind kitten knive
    knot lap lb leave leg lemon length lesson letter line lion live load loave lollipop machine magazine man mango
    marble mark marker marshmallow mask match matche matrice matrix meal medal meeting megabyte member men message
    mice mile minute mistake model monitor movie mph muffin mug multiple nail napkin necklace neighbor nephew
    newspaper nickel niece night noodle notebook novel number nurse nut object one orange orchid order outfit owl
    pack package packet page painting pair pan pancake pant papaya paperclip parent parrot participant passenger
    pastrie path patient peache peanut pebble peg pen pencil penguin pennie penny people period permutation person
    pet petal phone photo picture pie piece pig pill pizza plane plank plant plate player plug plum point polygon
    popsicle portion position possibility poster pot potato potatoe present prime problem product pumpkin pupil
    puppie puppy puzzle quart question quiz quizze rat recipe rectangle region resident restaurant result revolution
    ribbon ring robot rock roll room root rose rotation round row run sale sandwich sandwiche scarf scarve scoop
    scooter score seashell season seat seed segment semester sentence serving session set share sheep sheet shell
    shelve ship shirt shoe shot sibling side sister skip slice snake snowball sock soldier solution song space spoon
    square squirrel stair stamp star statue step stick sticker stone storie stork story straw strawberrie strawberry
    student subject subset suit suitcase supplie table tablespoon tank teacher team tear teaspoon teeth term thing
    ticket tie tile time tire tomato tomatoe toothpick topping total towel toy tractor trade train tray tree
    triangle tricycle trip triple triplet trophie trophy truck tube turn turtle uniform unit value van vector
    vegetable vertex vertice visitor vote wagon wall watermelon way wheel widget win window woman women word workday
    worker wrapper zero
"""
_ADJECTIVES = """
    all altogether black blue brown correct dark different distinct empty equal extra female full gray green large left
    long male more new old pink positive possible purple real red remaining right small such unique unordered
    ordered violet white whole yellow per both here there today daily
"""
NOUNS = frozenset(_NOUNS.split())
ADJECTIVES = frozenset(_ADJECTIVES.split())
_CHANGING = re.compile(
    r".*[^aeiou]ths?|or|and|not|no|half|halve|third|quarter|plus|minus|times|over|under|than|least|most|less|more|fewer"
    r"|square|squared|cubed|factorial|negative|wrong|incorrect|squareroot|zero|one|two|three|four|five|six|seven"
    r"|eight|nine|ten|percent|mod|modulo|below|above|up|between"
)


def stem(word: str) -> str:
    """The word in lower case, without its plural "s" and full stop."""
    return word.lower().rstrip("s.")


def is_harmless(word: str) -> bool:
    """True for a listed noun or adjective."""
    return stem(word) in NOUNS or word.lower().rstrip(".") in ADJECTIVES


def may_be_a_noun(word: str) -> bool:
    """True for any word that is not known to change a number: what the gold itself counts is taken on trust."""
    return len(word) > 2 and not (_CHANGING.fullmatch(stem(word)) or _CHANGING.fullmatch(word.lower()))
