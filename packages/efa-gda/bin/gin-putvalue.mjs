#!/usr/bin/env node
import { main } from '../dist/gin-putvalue.js';

process.exitCode = await main(process.argv.slice(2));
