"""What serves texts that come and go. Here is who waits, who runs and who is told; how texts are written is decided below."""
