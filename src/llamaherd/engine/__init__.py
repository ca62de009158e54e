"""libllama made safe: nothing here can abort the process or leak a pointer."""
