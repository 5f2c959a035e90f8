"""From a data set to a directory of activations that other tools read, and back.

`sequences` reads what is given, `positions` chooses tokens of it, `batches` groups them, `rows` says what a
token's row of a value is, `statistics` adds them up, `shards` puts them on disk whole or not at all,
`index` says what a store holds, `ranks` shares the work, `progress` shows it, and `run` is the verb that
does all of it. `store` reads what was written.

The folder is not called `harvest`, as the verb is: importing it would put the module in the verb's place.
"""
