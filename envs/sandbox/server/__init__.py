"""Server of the sandbox: runs each program in a child process that the kernel lets do nothing but compute.

It is a program of its own, started by an interpreter without site packages (`-P -s -S`) that has this package on its
path under the name `server` and imports nothing else of `envs`: a child is forked from it and has in memory what it has
imported. Hence the relative imports. Its argument is a JSON object of limits. Requests and replies are pairs of frames
on standard input and output. The first frame of a request has the program and its inputs, the second one hidden inputs.

A child confines itself (`confinement`) and runs one program (`child`). Modules that programs may import are imported
before. CPU time, time spent waiting, memory and the length of the result are limited. No program is ever in the memory
of the server, from which the next ones are forked (`serving`).
"""
