"""Answers to `bottlenecks` of notebook 15."""

from tests.answers import Exercise

answers = Exercise("bottlenecks")


@answers.right(line="right")
def bottlenecks():
    return {
        "A": "tensor",
        "B": "bubble",
        "C": "gradients",
        "D": "memory",
        "E": "messages",
        "F": "Python",
    } | {"G": "bubble"}


def spoil(mistake, letter, right, wrong):
    answers.spoil(bottlenecks, mistake, {f'"{letter}": "{right}",\n': f'"{letter}": "{wrong}",\n'})


spoil("tensor parallelism's traffic is not seen", "A", "tensor", "gradients")
spoil("the bubble is not seen", "B", "bubble", "messages")
spoil("the gradients are not seen", "C", "gradients", "Python")
spoil("a full card is not seen", "D", "memory", "bubble")
spoil("a wait that no arithmetic has", "E", "messages", "bubble")
spoil("Python's pace is not seen", "F", "Python", "tensor")
answers.spoil(bottlenecks, "what fewer micro-batches change", {'| {"G": "bubble"}': '| {"G": "messages"}'})
answers.spoil(bottlenecks, "a word that is not in the list", {'| {"G": "bubble"}': '| {"G": "the bubble"}'})
