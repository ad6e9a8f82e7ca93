"""Twenty things that a user may ask, for claims about SmolLM2."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about rain on a tin roof.",
    "Explain to a child why the sky is blue.",
    "List five animals that live in the sea.",
    "Translate 'good morning' into Spanish and Italian.",
    "What is 17 times 23? Show your steps.",
    "Give me a recipe for pancakes with three ingredients.",
    "Who wrote Pride and Prejudice, and when?",
    "Write a Python function that reverses a list.",
    "Name the planets in order of their distance from the sun.",
    "Summarise the story of Romeo and Juliet in two sentences.",
    "How does a bicycle stay upright?",
    "What should I pack for a week in the mountains?",
    "Describe the taste of a lemon without using the word sour.",
    "Why do leaves change colour in autumn?",
    "Write a polite e-mail asking for a day off.",
    "What is the difference between a lake and a sea?",
    "Tell me a joke about computers.",
    "How many minutes are there in a leap year?",
    "Continue: Once upon a time, in a village by the river,",
)
