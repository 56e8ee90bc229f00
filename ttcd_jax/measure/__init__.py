"""Whatever is measured: tasks, their records, results on disk, pictures and pages."""
