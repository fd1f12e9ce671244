"""What reports are made of: percentiles, tables in Markdown, pages in HTML."""
