"""What a trained model is worth: losses of texts, likelihoods of continuations, tasks."""
