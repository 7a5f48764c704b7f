"""Answers to pipelined (13): stages of a pipeline, which hand on what they made by ppermute."""

from tests.answers import Exercise
from tests.extras import need_jax

# fmt: off
answers = Exercise("pipelined", needs=need_jax)


@answers.right(line="right on 4 stages")
def in_a_loop(stage, own, x):
    import jax.numpy as jnp
    from jax import lax

    me, stages = lax.axis_index("pp"), lax.axis_size("pp")
    onward = [(one, one + 1) for one in range(stages - 1)]
    arrived, made = jnp.zeros_like(x[0]), []
    for tick in range(len(x) + stages - 1):
        fresh = x[min(tick, len(x) - 1)]
        made.append(stage(own, jnp.where(me == 0, fresh, arrived)))
        arrived = lax.ppermute(made[-1], "pp", onward)
    return jnp.stack(made[stages - 1 :])


@answers.right
def scanned(stage, own, x):
    import jax.numpy as jnp
    from jax import lax

    me, stages = lax.axis_index("pp"), lax.axis_size("pp")

    def tick(arrived, number):
        made = stage(own, jnp.where(me == 0, x[jnp.minimum(number, len(x) - 1)], arrived))
        return lax.ppermute(made, "pp", [(one, (one + 1) % stages) for one in range(stages)]), made

    nothing_yet = lax.pcast(jnp.zeros_like(x[0]), "pp", to="varying")
    made = lax.scan(tick, nothing_yet, jnp.arange(len(x) + stages - 1))[1]
    return lax.psum(jnp.where(me == stages - 1, made[stages - 1 :], 0), "pp")


def spoil(mistake, words):
    answers.spoil(in_a_loop, mistake, words)


spoil("nobody hands anything on", {"me == 0": "me >= 0"})
spoil("the first ticks are taken for results", {"made[stages - 1 :]": "made[: len(x)]"})
spoil("it ends too soon", {"range(len(x) + stages - 1)": "range(len(x))"})


@answers.wrong("one micro-batch after the other")
def one_micro_batch_after_the_other(stage, own, x):
    import jax.numpy as jnp
    from jax import lax

    me, stages = lax.axis_index("pp"), lax.axis_size("pp")
    done = []
    for one in x:
        made = stage(own, one)
        for at in range(1, stages):
            arrived = lax.ppermute(made, "pp", [(at - 1, at)])
            made = jnp.where(me == at, stage(own, arrived), made)
        done.append(made)
    return jnp.stack(done)


@answers.wrong("more is gathered than a stage needs")
def no_pipeline(stage, own, x):
    from jax import lax

    for weights in lax.all_gather(own, "pp"):
        x = stage(weights, x)
    return x


@answers.wrong("the whole batch at once")
def a_tick_a_stage(stage, own, x):
    import jax.numpy as jnp
    from jax import lax

    me, stages = lax.axis_index("pp"), lax.axis_size("pp")
    arrived = jnp.zeros_like(x)
    for _ in range(stages):
        made = stage(own, jnp.where(me == 0, x, arrived))
        arrived = lax.ppermute(made, "pp", [(one, one + 1) for one in range(stages - 1)])
    return made
