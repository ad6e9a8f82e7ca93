"""Model families: one file each; ``registry`` lists them, ``loader`` loads one."""
