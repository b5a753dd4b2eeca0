"""Spindle on Modal: a recipe says what runs where, ``spindle.modal_app`` is the app. Only that file imports ``modal``.

Where things are placed, and why. The services that Modal itself is made of (its input queue, its blob store, its key-value store) are
nearest us-east: a round trip to them takes about 25 ms from us-east, 75 from us-west, 112 from eu-west and 260 from ap-southeast. A
frontend makes such trips for every request it passes on, so it is *placed* where they are short, whatever region its callers are routed
through.
A trainer makes almost none while it computes, so it goes where a GPU is free, unless the recipe pins it.

The request path is one hop. The frontend never opens the envelope: it reads the model's id off the front of a body, and passes the client's
compressed bytes on as they came; the trainer inflates them. Answers come back the same way. No key-value store is asked which trainer
holds a model: with one trainer there is nothing to ask, and with several the caller's key decides, by a hash that every frontend computes
alike. A long poll is one call, held open to the trainer. By default the trainer serves HTTP itself and there is no hop at all.

Scaling out. One recipe is one base model and one app. Several base models are several recipes, each with its URL. ``trainer.count`` adds
trainers of the same base model; everything of one key lives on one of them, so sessions, adapters, checkpoints and samplers of a key
stay in one process, where passing weights from training to sampling is a pointer. What has to stay in one process: an engine's adapters,
its schedule, and its store's catalogue.
"""
