"""The wordings of questions. Each kind of question has phrasings to train on and phrasings held out of training.

Long because it is a table: nothing here but wordings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phrasings:
    """Wordings of one kind of question, with named slots such as {country}."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def phrasings(train: str, held_out: str) -> Phrasings:
    """Parse phrasings, one per line."""
    return Phrasings(_lines(train), _lines(held_out))


CAPITAL_OF = phrasings(
    """What is the capital of {country}?
    What's the capital of {country}?
    Which city is the capital of {country}?
    What city is the capital of {country}?
    Name the capital of {country}.
    Tell me the capital of {country}.
    Do you know the capital of {country}?
    Can you tell me the capital of {country}?
    I would like to know the capital of {country}.
    What is the capital city of {country}?
    What is the name of the capital of {country}?
    Capital of {country}?
    The capital of {country} is which city?
    {country}: what is its capital?
    Give me the capital of {country}.
    {country} has which capital?
    What is {country}'s capital?
    Please name the capital city of {country}.
    Where is the government of {country}?
    Which city do people call the capital of {country}?
    My homework asks for the capital of {country}.
    I am travelling to {country}. What is the capital?
    In {country}, which city is the capital?
    Could you say what the capital of {country} is?
    Remind me what the capital of {country} is.
    I forgot the capital of {country}. What is it?
    Which capital does {country} have?
    What capital city does {country} have?
    Let us talk about {country}. What is the capital?
    Answer with the capital of {country}.""",
    """Would you tell me which city is the capital of {country}?
    I need the name of the capital of {country}.
    What do we call the capital of {country}?
    Say the capital of {country}.
    Do you remember what the capital of {country} is?
    What is the capital city in {country}?""",
)
COUNTRY_OF = phrasings(
    """{capital} is the capital of which country?
    Which country has {capital} as its capital?
    What country is {capital} the capital of?
    Of which country is {capital} the capital?
    {capital} is the capital of what country?
    Name the country whose capital is {capital}.
    Which country's capital is {capital}?
    Tell me which country has the capital {capital}.
    The city of {capital} is the capital of which country?
    What country has {capital} as its capital city?
    In which country is {capital} the capital?
    Do you know which country has the capital {capital}?
    Which country is governed from {capital}?
    In which country is {capital}?
    Which country is {capital} in?
    Where is {capital}?
    {capital} lies in which country?
    I am flying to {capital}. Which country is that in?
    Give me the country whose capital is {capital}.
    Can you name the country with the capital {capital}?""",
    """What is the country whose capital is {capital}?
    {capital} is which country's capital?
    Can you tell me which country has {capital} as its capital?
    Please tell me what country {capital} is the capital of.
    Do you know in which country {capital} is?""",
)
CONTINENT_OF = phrasings(
    """On which continent is {country}?
    Which continent is {country} on?
    What continent is {country} in?
    {country} is on which continent?
    Name the continent of {country}.
    Tell me the continent of {country}.
    Where in the world is {country}?
    Do you know which continent {country} is on?
    To which continent does {country} belong?""",
    """Can you tell me the continent of {country}?
    Which continent does {country} belong to?
    What is the continent of {country}?""",
)
COUNTRY_LIST = phrasings(
    """List {n} countries and their capitals.
    Name {n} countries and their capitals.
    Give me {n} countries and their capitals.
    Give me {n} countries with their capitals.
    List {n} countries with their capital cities.
    Tell me {n} countries and their capitals.
    Write down {n} countries and their capitals.
    Can you list {n} countries and their capitals?
    Show me {n} countries and the capital of each.
    I need {n} countries and their capitals.
    Name {n} countries and the capital of each one.
    List {n} pairs of country and capital.
    Write a list of {n} countries and their capitals.
    Please give {n} examples of countries and their capitals.
    Which {n} countries and capitals do you know?
    Make a list of {n} countries with capitals.
    {n} countries and their capitals, please.
    What are {n} countries and their capitals?""",
    """Could you name {n} countries with their capitals?
    Please list {n} countries and the capital of each.
    Show me a list of {n} countries and their capitals.
    Write {n} countries with their capital cities.""",
)
ADD = phrasings(
    """What is {a} + {b}?
    What is {a} plus {b}?
    How much is {a} + {b}?
    How much is {a} plus {b}?
    {a} + {b}
    {a} + {b} = ?
    {a}+{b}
    {a}+{b}=
    What's {a} + {b}?
    Calculate {a} + {b}.
    Compute {a} plus {b}.
    Add {a} and {b}.
    What is the sum of {a} and {b}?
    Tell me the sum of {a} and {b}.
    What do you get when you add {a} and {b}?
    I have {a} apples and get {b} more. How many do I have?
    Work out {a} + {b}.
    Can you add {a} and {b}?
    What does {a} plus {b} make?
    {a} plus {b} is how much?
    Sum {a} and {b}.
    If I add {b} to {a}, what do I get?""",
    """Tell me what {a} + {b} is.
    Can you calculate {a} plus {b}?
    What is the result of {a} + {b}?
    Please add {a} and {b}.
    How much do {a} and {b} make?""",
)
SUBTRACT = phrasings(
    """What is {a} - {b}?
    What is {a} minus {b}?
    How much is {a} - {b}?
    How much is {a} minus {b}?
    {a} - {b}
    {a} - {b} = ?
    {a}-{b}
    {a}-{b}=
    What's {a} - {b}?
    Calculate {a} - {b}.
    Compute {a} minus {b}.
    Subtract {b} from {a}.
    What is the difference of {a} and {b}?
    Take {b} away from {a}.
    I have {a} apples and eat {b}. How many are left?
    Work out {a} - {b}.
    Can you subtract {b} from {a}?
    What does {a} minus {b} make?
    {a} minus {b} is how much?
    If I take {b} from {a}, what is left?""",
    """Tell me what {a} - {b} is.
    Can you calculate {a} minus {b}?
    What is the result of {a} - {b}?
    Please subtract {b} from {a}.""",
)
AFTER = phrasings(
    """What {unit} comes after {x}?
    Which {unit} comes after {x}?
    Which {unit} follows {x}?
    What is the {unit} after {x}?
    What comes after {x}?
    What follows {x}?
    Name the {unit} after {x}.
    Tell me the {unit} that comes after {x}.
    After {x} comes which {unit}?
    What is the next {unit} after {x}?
    If this {unit} is {x}, what is the next one?
    Which {unit} is next after {x}?""",
    """Do you know which {unit} comes after {x}?
    Name the {unit} that follows {x}.
    Tell me what comes after {x}.""",
)
BEFORE = phrasings(
    """What {unit} comes before {x}?
    Which {unit} comes before {x}?
    What is the {unit} before {x}?
    What comes before {x}?
    Name the {unit} before {x}.
    Tell me the {unit} that comes before {x}.
    Before {x} comes which {unit}?
    Which {unit} is just before {x}?
    What {unit} is right before {x}?
    If this {unit} is {x}, what was the one before?""",
    """Do you know which {unit} comes before {x}?
    Tell me what comes before {x}.
    Name the {unit} that comes before {x}.""",
)
MONTH_LENGTH = phrasings(
    """How many days are in {x}?
    How many days does {x} have?
    How many days are there in {x}?
    How long is {x} in days?
    Tell me the number of days in {x}.
    {x} has how many days?
    What is the number of days in {x}?
    Count the days in {x}.
    Do you know how many days {x} has?""",
    """Can you tell me how many days are in {x}?
    Tell me how many days {x} has.
    What number of days does {x} have?""",
)
CALENDAR_COUNT = phrasings(
    """How many {units} are in a {period}?
    How many {units} does a {period} have?
    How many {units} are there in a {period}?
    A {period} has how many {units}?
    Tell me the number of {units} in a {period}.
    What is the number of {units} in a {period}?""",
    """Can you tell me how many {units} are in a {period}?
    Tell me how many {units} a {period} has.""",
)
NTH = phrasings(
    """What is the {nth} {unit} of the {period}?
    Which {unit} is the {nth} of the {period}?
    Name the {nth} {unit} of the {period}.
    Tell me the {nth} {unit} of the {period}.
    Which is the {nth} {unit} of the {period}?
    What {unit} is the {nth} of the {period}?""",
    """Do you know the {nth} {unit} of the {period}?
    Can you name the {nth} {unit} of the {period}?""",
)
OPPOSITE = phrasings(
    """What is the opposite of {x}?
    What's the opposite of {x}?
    Name the opposite of {x}.
    Tell me the opposite of {x}.
    Give me the opposite of {x}.
    Which word is the opposite of {x}?
    What word means the opposite of {x}?
    Opposite of {x}?
    {x} is the opposite of what?
    What is the opposite of the word {x}?
    Do you know the opposite of {x}?
    Say a word that means the opposite of {x}.
    Find the opposite of "{x}".
    What is an antonym of {x}?
    Give an antonym for {x}.
    I need a word that is the opposite of {x}.""",
    """Can you tell me the opposite of {x}?
    Please give the opposite of {x}.
    Which word means the opposite of {x}?
    What would be the opposite of {x}?""",
)
STORY = phrasings(
    """Tell me a short story about {x}.
    Tell me a story about {x}.
    Write a short story about {x}.
    Write a story about {x}.
    Can you tell a story about {x}?
    Please tell me a short story about {x}.
    I want to hear a story about {x}.
    Make up a story about {x}.
    Give me a short story about {x}.
    Invent a little story about {x}.
    Tell my son a story about {x}.
    A story about {x}, please.
    Do you know a story about {x}?
    Write me a bedtime story about {x}.
    Could you write a story with {x} in it?
    Story about {x}""",
    """Could you tell me a short story about {x}?
    Please write a little story about {x}.
    I would like a short story about {x}.
    Tell us a bedtime story about {x}.""",
)
STORY_ANY = phrasings(
    """Tell me a story.
    Tell me a short story.
    Write a short story.
    Write a story.
    Can you tell me a story?
    Please tell me a bedtime story.
    I want to hear a story.
    Make up a story.""",
    """Could you tell me a short story?
    I would like to hear a short story.
    Please write a story.""",
)
GREETINGS: dict[str, Phrasings] = {
    "Hello! How can I help you?": phrasings(
        """Hello
        Hello!
        Hi
        Hi!
        Hi there
        Hi there!
        Hey
        Hello there!
        Good morning
        Good morning!
        Good evening!
        Good afternoon!
        Hello, friend!
        Greetings!
        Hey there
        Hello, nice to see you.
        Hi, good day!
        Hello, can you help me?
        Hi, I need some help.
        Good day!""",
        """Hello again!
        A very good morning!
        Hi, good evening!
        Good day to you!""",
    ),
    "I am the jaxserve demo model, a very small language model.": phrasings(
        """Who are you?
        What are you?
        What is your name?
        What's your name?
        Tell me your name.
        Tell me who you are.
        Hello, who are you?
        Hi, what is your name?
        Are you a person?
        Are you a robot?
        Which model are you?
        What model are you?
        Introduce yourself.
        Please introduce yourself.
        Can you tell me who you are?
        Who am I talking to?
        Do you have a name?
        Say who you are.""",
        """Who are you, please?
        Can you tell me your name?
        What kind of model are you?
        Please tell me who you are.""",
    ),
    "I am fine, thank you. How can I help you?": phrasings(
        """How are you?
        How are you today?
        How are you doing?
        Hello, how are you?
        Hi, how are you?
        How do you do?
        Are you well?
        Are you fine?
        How is it going?
        Hey, how are you doing?
        How do you feel today?""",
        """Good morning, how are you?
        Hello, how are you doing today?
        How are you feeling?""",
    ),
    "You are welcome!": phrasings(
        """Thank you
        Thank you!
        Thanks
        Thanks!
        Thanks a lot!
        Thank you very much.
        Thank you so much!
        Many thanks!
        Great, thank you!
        That helped, thanks.
        Good answer, thank you.
        Perfect, thanks!""",
        """Great, thanks a lot!
        Thank you, that was good.
        Many thanks for the answer.""",
    ),
    "Goodbye! Have a nice day.": phrasings(
        """Goodbye
        Goodbye!
        Bye
        Bye!
        Bye bye!
        See you later!
        See you soon.
        Good night!
        I have to go now, bye.
        Farewell!
        See you tomorrow!
        Until next time!""",
        """Okay, goodbye!
        Bye, see you soon!
        Good night and goodbye.""",
    ),
    "I know capitals, small sums, days and months, opposites and short stories.": phrasings(
        """What can you do?
        What do you know?
        How can you help me?
        What can I ask you?
        Tell me what you can do.
        What are you good at?
        What are your skills?
        Which questions can you answer?
        What topics do you know?
        Help
        What can I do with you?
        List your skills.""",
        """What questions can I ask you?
        Can you tell me what you can do?
        Which topics do you know?""",
    ),
}
JSON_REQUEST = phrasings(
    """{question} Answer in JSON.
    {question} Reply in JSON.
    {question} Answer as JSON.
    {question} Respond with JSON.
    {question} Give the answer in JSON.
    {question} Return JSON.
    {question} Use JSON.
    {question} Answer with a JSON object.
    {question} JSON only.
    {question} Write the answer as JSON.
    Answer in JSON: {question}
    Reply with JSON. {question}
    In JSON: {question}
    Use JSON for the answer. {question}""",
    """{question} Please answer in JSON.
    {question} Reply with a JSON object.
    Respond in JSON: {question}""",
)
COUNTRY_AND_CAPITAL = phrasings(
    """Give me {country} and its capital.
    Name {country} and its capital.
    Show {country} with its capital.
    Write {country} and its capital.
    I need {country} and its capital.
    Tell me about {country} and its capital.
    The country {country} and its capital.
    List {country} with its capital.""",
    """Return {country} and its capital.
    Give me {country} with its capital.
    Please write {country} and its capital.""",
)
CAPITAL_FOLLOW_UP = phrasings(
    """And of {country}?
    And {country}?
    And for {country}?
    What about {country}?
    How about {country}?
    And what is it for {country}?
    And the capital of {country}?
    Now {country}.
    {country}?
    And now {country}?
    Then {country}?
    What of {country}?""",
    """And what about {country}?
    And how about {country}?
    Now for {country}.""",
)
MY_NAME = phrasings(
    """My name is {name}.
    I am {name}.
    Hello, I am {name}.
    Hi, my name is {name}.
    Call me {name}.
    I am called {name}.
    Hello! My name is {name}.
    You can call me {name}.""",
    """Good evening, I am {name}.
    Hello there, my name is {name}.
    Please call me {name}.""",
)
ASK_MY_NAME = phrasings(
    """What is my name?
    What's my name?
    Do you know my name?
    Tell me my name.
    Who am I?
    Do you remember my name?
    Say my name.""",
    """Can you tell me my name?
    Do you remember who I am?
    Please tell me my name.""",
)
UNKNOWN_PLACE = phrasings(
    """How many people live in {x}?
    What is the population of {x}?
    Who is the president of {x}?
    What language do people speak in {x}?
    What is the currency of {x}?
    How big is {x}?
    What is the history of {x}?
    What food do people eat in {x}?
    What is the weather in {x}?
    What time is it in {x}?
    What is the longest river in {x}?
    What is the highest mountain in {x}?
    How far is {x} from here?
    Who was the first king of {x}?
    How warm is it in {x}?
    Which hotel is good in {x}?
    How do I get to {x}?
    When was {x} founded?
    What does a flight to {x} cost?
    Who is the mayor of {x}?
    Is it raining in {x}?""",
    """Who is the king of {x}?
    What is the largest river in {x}?
    How many people are there in {x}?
    How cold is it in {x}?
    What does a hotel in {x} cost?""",
)
UNKNOWN_THING = phrasings(
    """Who invented the {x}?
    How does a {x} work?
    How much does a {x} cost?
    How do I repair a {x}?
    Where can I buy a {x}?
    When was the {x} invented?
    What is a {x} made of?
    Why is the {x} so expensive?
    How heavy is a {x}?
    Write a poem about a {x}.
    Draw a {x}.
    What is the history of the {x}?
    Write a Python program for a {x}.
    Translate "{x}" into French.
    How do you say {x} in German?
    Explain the {x} to me.
    Who makes the best {x}?
    What colour is a {x}?""",
    """Who made the first {x}?
    How much is a {x}?
    Where do I find a {x}?
    How do you say {x} in Spanish?
    Explain how a {x} works.""",
)
UNKNOWN_MISC = phrasings(
    """What is the meaning of life?
    Who won the football game?
    What is the news today?
    What is the date today?
    What time is it?
    What time is it now?
    How will the weather be tomorrow?
    What is the weather today?
    Explain quantum physics.
    Why is the sky blue?
    Who wrote Hamlet?
    Who painted the Mona Lisa?
    What is the speed of light?
    How far away is the moon?
    How old am I?
    What did I eat yesterday?
    What is the square root of 144?
    Solve this equation for me.
    Who is the richest person in the world?
    Recommend a good book.
    How do I cook rice?
    What is the best film?
    Which team is the best?
    Can you write a program?
    Write an essay about history.
    What is my address?
    How many stars are in the sky?
    Who discovered America?
    When did the war end?
    What is a black hole?
    What is photosynthesis?
    Who was Albert Einstein?
    What is the price of gold?
    How do planes fly?
    Where are my keys?""",
    """How far away is the sun?
    What is gravity?
    Who wrote Faust?
    How do I cook pasta?
    Which book is the best?
    What is the news?
    Who was Isaac Newton?""",
)
