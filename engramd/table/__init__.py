"""The packed table on disk: geometry, manifest, packing, publishing, verifying. The format is docs/table_format.md."""
