"""A decoder-only byte-level language model with Moelith in every feed-forward layer, and the program that trains it.

    python -m moelith.train          # options: --help; each is an environment variable too (DATA, STEPS, RESUME, ...)

data.py reads text, model.py holds the model and its sizes, optimizer.py the parameter update, loop.py the training
loop, checkpoint.py the files to resume from, log.py the log, pictures.py what is drawn from it, clock.py the time
inside the MoE layers.
"""
