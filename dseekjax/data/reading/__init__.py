"""From files in several formats to documents, in constant memory."""
