"""Starting and watching the processes of a server."""
