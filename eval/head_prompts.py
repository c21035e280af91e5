"""What a model is asked, so that a head can be fitted to what it answers: free text and code, half and half.

A held-out prompt has a subject, or a job, of which no other prompt speaks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

Kind = Literal["text", "code"]
KINDS: tuple[Kind, ...] = ("text", "code")

_SUBJECTS = """a lighthouse keeper; baking bread; bees; the moon; a bicycle trip; volcanoes;
a village library;
winter; the Roman Empire; electric cars; growing tomatoes; a lost key; night trains; coffee; rivers; whales;
the human heart; learning the piano; old maps; a friendly robot; climbing a mountain; rain; friendship;
the internet; chess; clouds; how paper is made; ice cream; a wise owl; earthquakes; dreams; oil painting;
saving money; vitamins; gravity; photosynthesis; a pirate and her parrot; clocks; climate change;
a school play; spiders; the French Revolution; sleep; fractions; a spring market; sailing; cheese; bridges;
ants; black holes; a job interview; running; life in the desert; penguins; democracy; tea; batteries; glass;
William Shakespeare; potatoes; football; the immune system; satellites; a birthday party; forests;
dinosaurs; a haunted house; learning a language; wool; computers; a noisy neighbour; salt; the ocean floor;
a broken window; vaccines; the sun; violins; shipyards; a household budget; cats; a letter from far away;
steam engines; meditation; tigers; apples; memory; travel to Mars; good teachers; recycling; migrating birds;
castles; swimming; wind power; the first snow; a quiet village; healthy food; goldfish; public parks;
the printing press; a blacksmith; magnets; coral reefs; camping; jazz; the Nile; being kind;
a dragon; city traffic; photography; the alphabet; a baker's son; time zones; kites; moving to a new town;
honesty; the stock market; a shipwreck; mushrooms; working from home; how planes fly; sharing;
a talking tree"""
_ASKED = (
    "Write a short story about {}.",
    "Explain {} to a child of ten.",
    "Tell me five things about {}.",
    "Why does {} matter to people?",
    "Write a poem about {}.",
    "Describe {} in one paragraph.",
    "I know nothing about {}. Where should I begin?",
    "Write an email to a friend about {}.",
    "Give me some advice about {}.",
    "What speaks for {}, and what against it?",
    "Write the beginning of an essay about {}.",
    "Write a conversation of two people about {}.",
)
_JOBS = """reverses a string; sums the even numbers of a list; tells whether a number is prime;
sorts words by their length; counts how often each word occurs in a text; computes a factorial;
finds the largest number of a list; merges two sorted lists; removes duplicates from a list;
converts Celsius to Fahrenheit; prints a file line by line; gives the first n Fibonacci numbers;
tells whether a word is a palindrome; flattens a nested list; computes the average of numbers;
counts the vowels of a string; rotates a list by k places; transposes a matrix;
finds the elements that two lists have in common; checks an email address; implements a stack;
implements a queue; searches a sorted list by halves; sorts a list by exchanging neighbours;
finds the greatest common divisor of two numbers; prints a multiplication table; makes a random password;
groups words by their first letter; raises a number to a power; splits a text into sentences;
swaps keys and values of a dictionary; counts the lines of a file; works as a small calculator;
prints a triangle of stars; computes the area of a circle; finds the second largest number;
tells whether two words are anagrams; capitalises each word; multiplies two matrices;
reads numbers from the user until a zero; plays a game of guessing a number; keeps a list of tasks;
stores contacts with name and phone number; converts a number to binary; checks brackets for balance;
adds up the digits of a number; computes compound interest; finds the longest word of a sentence;
replaces spaces by underscores; generates a list of squares; counts down from ten;
computes the distance between two points; shuffles a deck of cards; encrypts a text by shifting letters;
converts a list of strings to integers; models a bank account; models a rectangle with its area;
finds missing numbers in a range; reads a CSV file into a list; sorts a dictionary by value;
tells whether a year is a leap year; finds all divisors of a number; logs messages with a time;
removes punctuation from a text; computes the median; walks through a linked list;
inserts values into a binary tree; downloads a web page; measures how long a function takes;
rolls two dice; filters the students who passed; prints today's date; pads a string to a given width"""
_ORDERED = (
    "Write a Python function that {}.",
    "Show me Python code that {}, with an example of its use.",
    "Write a JavaScript function that {}.",
    "Write a Python class that {}.",
    "Write a program in Python that {}. Explain it.",
    "How can I write code that {}? Use Python.",
    "Write a Java method that {}.",
    "Write tests and code in Python for a function that {}.",
)
_HELD_SUBJECTS = _HELD_JOBS = 12


class Prompt(msgspec.Struct, frozen=True):
    """One thing asked."""

    kind: Kind
    text: str


def training(seed: int = 7) -> list[Prompt]:
    """Prompts without the held-out ones, all different; text and code in turns."""
    text = _every("text", _ASKED, _words(_SUBJECTS)[:-_HELD_SUBJECTS])
    code = _every("code", _ORDERED, _words(_JOBS)[:-_HELD_JOBS])
    chance = random.Random(seed)
    chance.shuffle(text)
    chance.shuffle(code)
    return [prompt for both in zip(text, code, strict=False) for prompt in both]


def held_out() -> list[Prompt]:
    """One prompt for each held-out subject and job."""
    return [
        *_each("text", _ASKED, _words(_SUBJECTS)[-_HELD_SUBJECTS:]),
        *_each("code", _ORDERED, _words(_JOBS)[-_HELD_JOBS:]),
    ]


def _words(listed: str) -> list[str]:
    return " ".join(listed.split()).split("; ")


def _every(kind: Kind, forms: Sequence[str], words: Sequence[str]) -> list[Prompt]:
    return [Prompt(kind, form.format(word)) for form, word in itertools.product(forms, words)]


def _each(kind: Kind, forms: Sequence[str], words: Sequence[str]) -> list[Prompt]:
    return [
        Prompt(kind, form.format(word)) for form, word in zip(itertools.cycle(forms), words, strict=False)
    ]
