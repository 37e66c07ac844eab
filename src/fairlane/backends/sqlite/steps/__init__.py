"""The verbs as functions of a `Step`, the atomic unit of the store. They run in the writer's thread, inside its
transaction."""
