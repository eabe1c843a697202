"""Open a language model from any folder, and ask it for text and for scores.

    from gpt2_toolkit import load_model
    model = load_model("output/first")
    print(model.generate("Once upon a time", max_new_tokens=40))

The folder is a run folder, a checkpoint, an export or weights of another system. Importing this
package imports no framework; opening a model imports the one that runs it.
"""

from common.errors import GPT2Error
from common.inference.language_model import Generation, Generations, LanguageModel, Score
from common.inference.load import load_model

__all__ = ["GPT2Error", "Generation", "Generations", "LanguageModel", "Score", "load_model"]
