"""What `octavo bench` and `octavo profile` measure. Drivers of the engine and of servers, and the
record that every measurement ends in; the command line prints it."""
